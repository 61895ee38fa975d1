//! PHP workers: real `php-cgi` processes answering FastCGI.
//!
//! Not here: pools and requests of the edge (`edge`).

use std::path::Path;

use nagaya_keeper::client::{Keeper, ProcessGuard};
use nagaya_keeper::protocol::Failure;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;

use crate::Fact;
use crate::world::{ALICE, World, refusal, tenant_name};

pub const ROOT: &[Fact] = &[
    ("a PHP worker answers requests on its one connection under its tenant's uid", answers),
    ("a tenant has so many PHP workers and no more", limited),
    ("without php-cgi the answer says what to install", not_installed),
];

fn answers() {
    let world = World::new();
    let script = world.script("x.php", "<?php echo posix_getuid(), ' ', getmypid(), ' ', $_GET['q'];");
    let world = world.start();
    world.run(async |keeper| {
        let mut php = Php::start(&keeper).await;
        let mut pids = Vec::new();
        for q in ["one", "two"] {
            let said = php.ask(&script, &format!("q={q}")).await;
            let words: Vec<&str> = said.split(' ').collect();
            assert_eq!((words[0], words[2]), (ALICE.to_string().as_str(), q), "{said}");
            pids.push(words[1].to_owned());
        }
        assert_eq!(pids[0], pids[1], "one process serves the connection");
        let (exit, _) = php.guard.end().await.unwrap();
        assert!(exit.cpu_us > 0);
        assert_eq!(php.stream.read(&mut [0; 8]).await.unwrap_or(0), 0, "the connection ends with it");
    });
    assert_eq!(std::fs::read_dir(world.dir.path().join("run/php")).unwrap().count(), 0, "no path is left");
}

fn limited() {
    let world = World::new().start();
    world.run(async |keeper| {
        let alice = tenant_name("alice");
        let _first = keeper.spawn_php(&alice).await.unwrap();
        let second = keeper.spawn_php(&alice).await.unwrap();
        assert_eq!(refusal(keeper.spawn_php(&alice).await), (Failure::Busy, 307));
        keeper.spawn_php(&tenant_name("bob")).await.unwrap();
        second.guard.end().await.unwrap();
        keeper.spawn_php(&alice).await.unwrap();
        assert_eq!(refusal(keeper.spawn_php(&tenant_name("none")).await), (Failure::NotFound, 301));
    });
}

fn not_installed() {
    let world = World::new().with(|options| options.php_cgi = "/does/not/exist/php-cgi".into()).start();
    world.run(async |keeper| {
        assert_eq!(refusal(keeper.spawn_php(&tenant_name("alice")).await), (Failure::Broken, 309));
    });
}

/// A worker of alice's and its connection.
pub struct Php {
    pub stream: UnixStream,
    pub guard: ProcessGuard,
    pub cell: Box<str>,
}

impl Php {
    pub async fn start(keeper: &Keeper) -> Self {
        let worker = keeper.spawn_php(&tenant_name("alice")).await.unwrap();
        let stream = UnixStream::from_std(worker.socket.into()).unwrap();
        Self { stream, guard: worker.guard, cell: worker.cell }
    }

    /// What a script says, without its header.
    pub async fn ask(&mut self, script: &Path, query: &str) -> String {
        let params = [
            ("SCRIPT_FILENAME", script.to_str().unwrap()),
            ("REQUEST_METHOD", "GET"),
            ("QUERY_STRING", query),
            ("REDIRECT_STATUS", "200"),
        ];
        self.stream.write_all(&request(&params)).await.unwrap();
        let answer = read_answer(&mut self.stream).await;
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        assert!(head.contains("Content-type: text/html"), "{head}");
        body.to_owned()
    }
}

/// A FastCGI request without body, FCGI_KEEP_CONN set (FastCGI 1.0, sections 3.3 and 5).
fn request(params: &[(&str, &str)]) -> Vec<u8> {
    let mut pairs = Vec::new();
    for (name, value) in params {
        pairs.push(u8::try_from(name.len()).unwrap());
        pairs.extend((u32::try_from(value.len()).unwrap() | 1 << 31).to_be_bytes());
        pairs.extend(name.as_bytes());
        pairs.extend(value.as_bytes());
    }
    let mut out = record(1, &[0, 1, 1, 0, 0, 0, 0, 0]);
    out.extend(record(4, &pairs));
    out.extend(record(4, &[]));
    out.extend(record(5, &[]));
    out
}

fn record(kind: u8, content: &[u8]) -> Vec<u8> {
    let mut out = vec![1, kind, 0, 1];
    out.extend(u16::try_from(content.len()).unwrap().to_be_bytes());
    out.extend([0, 0]);
    out.extend(content);
    out
}

/// What the worker wrote to its standard output, until the end of the request.
async fn read_answer(stream: &mut UnixStream) -> String {
    let mut out = Vec::new();
    loop {
        let mut head = [0; 8];
        stream.read_exact(&mut head).await.unwrap();
        let len = usize::from(u16::from_be_bytes([head[4], head[5]])) + usize::from(head[6]);
        let mut content = vec![0; len];
        stream.read_exact(&mut content).await.unwrap();
        content.truncate(len - usize::from(head[6]));
        match head[1] {
            3 => return String::from_utf8(out).unwrap(),
            6 => out.extend(content),
            other => panic!("record of type {other}"),
        }
    }
}
