//! PHP workers: real `php-cgi` processes answering FastCGI.
//!
//! Not here: pools and requests of the edge (`edge`).

use std::path::Path;

use bytes::BytesMut;
use nagaya_keeper_api::client::{KeeperClient, ProcessGuard};
use nagaya_keeper_api::fastcgi::UsageReport;
use nagaya_keeper_api::protocol::FailureKind;
use nagaya_records::cell::{Confinement, RequestUsage};
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;

use crate::Fact;
use crate::scene::TIMEOUT;
use crate::world::{ALICE, World, cgi, refusal, site_name};

pub const ROOT: &[Fact] = &[
    ("a PHP worker answers requests on its one connection under its tenant's uid", answers),
    ("a tenant has so many PHP workers and no more", limited),
    ("without php-cgi the answer says what to install", not_installed),
    ("a hostile edge gets PHP workers for PHP sites only", for_php_sites_only),
    ("a PHP worker runs scripts of the site it serves and no other file", its_sites_scripts_only),
    ("nothing of a request's body is taken for a request by a PHP worker", no_request_in_a_body),
    ("the CPU time of PHP requests is counted once, also of short ones", counted_once),
];

fn answers() {
    let world = World::new();
    let script = world.script("x.php", "<?php echo posix_getuid(), ' ', getmypid(), ' ', $_GET['q'];");
    let world = with_sites(world).start();
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
        let mut told = Vec::new();
        php.stream.read_to_end(&mut told).await.unwrap();
        // FCGI_OVERLOADED (FastCGI 1.0, section 5.5): nobody has a request that may be on its way.
        assert_eq!(told, record(3, &[0, 0, 0, 0, 2, 0, 0, 0]), "the connection ends with it");
    });
    assert_eq!(std::fs::read_dir(world.dir.path().join("run/php")).unwrap().count(), 0, "no path is left");
}

/// A worker says its own CPU time and that of its ended children. The reports of its requests have
/// the same sum, but for the part of a request after its script.
fn counted_once() {
    const TAIL_US: u64 = 2_000;
    let world = World::new();
    let script = world.script(
        "x.php",
        "<?php if ($_GET['q'] === 'child') shell_exec('i=0; while [ $i -lt 50000 ]; do i=$((i+1)); done'); \
         function used($who) { $r = getrusage($who); return 1000000 * ($r['ru_utime.tv_sec'] + $r['ru_stime.tv_sec']) \
         + $r['ru_utime.tv_usec'] + $r['ru_stime.tv_usec']; } echo used(0), ' ', used(1);",
    );
    let world = with_sites(world).start();
    world.run(async |keeper| {
        let mut php = Php::start(&keeper).await;
        keeper.enter(php.guard.id(), &site_name("php"), &Confinement::default()).await.unwrap();
        let (mut said, mut reported) = (Vec::new(), Vec::new());
        for number in 0..100 {
            let q = if number % 40 == 30 { "q=child" } else { "q=none" };
            let numbers = php.ask(&script, q).await;
            let numbers: Vec<u64> = numbers.split(' ').map(|number| number.parse().unwrap()).collect();
            said.push((numbers[0], numbers[1]));
            reported.push(php.leave(&keeper).await.cpu_us);
        }
        let (first, last) = (said[0], said[99]);
        assert!(last.1 - first.1 > 10_000, "programs ran: {said:?}");
        let (sum, expected) = (reported[1..].iter().sum::<u64>(), last.0 - first.0 + last.1 - first.1);
        assert!(sum.abs_diff(expected) < TAIL_US, "{sum} for {expected}: {reported:?}");
        let of_program = reported[30];
        assert!(of_program >= said[30].1 - said[29].1, "its own request has it: {of_program}");
    });
}

/// A PHP site for each of the tenants, and one more of alice's.
pub fn with_sites(mut world: World) -> World {
    for (site, tenant, root) in [("php", "alice", "www"), ("more", "alice", "more"), ("bobs", "bob", "www")] {
        world.site(site, tenant, json!({"kind": "php", "root": root}));
    }
    world
}

fn limited() {
    let world = with_sites(World::new()).start();
    world.run(async |keeper| {
        let alice = site_name("php");
        let _first = keeper.spawn_php(&alice, Some(0)).await.unwrap();
        let second = keeper.spawn_php(&alice, Some(0)).await.unwrap();
        assert_eq!(refusal(keeper.spawn_php(&alice, Some(0)).await), (FailureKind::Busy, 307));
        keeper.spawn_php(&site_name("bobs"), Some(0)).await.unwrap();
        second.guard.end().await.unwrap();
        keeper.spawn_php(&alice, Some(0)).await.unwrap();
        assert_eq!(
            refusal(keeper.spawn_php(&site_name("none"), Some(0)).await),
            (FailureKind::NotFound, 301)
        );
    });
}

fn not_installed() {
    let world = World::new().with(|options| options.php_cgi = "/does/not/exist/php-cgi".into());
    let world = with_sites(world).start();
    world.run(async |keeper| {
        assert_eq!(refusal(keeper.spawn_php(&site_name("php"), Some(0)).await), (FailureKind::Broken, 309));
    });
}

fn for_php_sites_only() {
    let mut world = World::new();
    world.site("cgi", "bob", cgi());
    world.site("static", "bob", json!({"kind": "static", "root": "www"}));
    world.site("http", "bob", json!({"kind": "http", "address": "127.0.0.1:1"}));
    let world = with_sites(world).start();
    world.run(async |keeper| {
        for site in ["cgi", "static", "http"] {
            assert_eq!(
                refusal(keeper.spawn_php(&site_name(site), Some(0)).await),
                (FailureKind::Invalid, 302),
                "{site}"
            );
        }
    });
}

/// What a hostile edge sends, and what becomes of it.
fn its_sites_scripts_only() {
    let world = World::new();
    let code = "<?php echo 'RAN';";
    let script = world.script("x.php", code);
    let www = script.parent().unwrap().to_owned();
    world.script("avatar.jpg", code);
    let outside = [world.dir.path().join("outside.php"), world.home("alice").join("above.php")];
    for path in &outside {
        std::fs::write(path, code).unwrap();
        world.own(path, ALICE);
    }
    std::os::unix::fs::symlink(&outside[0], www.join("link.php")).unwrap();
    // Her own, in her home: as any link to her own files is.
    std::os::unix::fs::symlink(&outside[1], www.join("own.php")).unwrap();
    let more = world.home("alice").join("more");
    std::fs::create_dir(&more).unwrap();
    std::fs::write(more.join("y.php"), code).unwrap();
    world.own(&more, ALICE);
    let world = with_sites(world).start();
    let text = |path: &Path| path.to_str().unwrap().to_owned();
    let within = |rest: &str| format!("{}/{rest}", text(&www));
    let named = |file: &str| vec![("SCRIPT_FILENAME", file.to_owned())];
    let with = |name, value: &str| vec![("SCRIPT_FILENAME", text(&script)), (name, value.to_owned())];
    let above = text(&outside[1]);
    let refused = [
        named(&text(&outside[0])),
        named(&above),
        named(&text(&more.join("y.php"))),
        named(&within("avatar.jpg")),
        named(&within("../above.php")),
        named(&within("/..//above.php")),
        named(&within("x.php/../../above.php")),
        named(&within("link.php")),
        named(&format!("{}\0.php", within("avatar.jpg"))),
        vec![("PATH_TRANSLATED", above.clone())],
        [named(&within("x.php")), named(&above)].concat(),
        [with("PATH_TRANSLATED", &above), vec![("REDIRECT_URL", "/".to_owned())]].concat(),
        with("DOCUMENT_ROOT", "/"),
        with("PHP_VALUE", "auto_prepend_file=/etc/passwd"),
        with("PHP_ADMIN_VALUE", "open_basedir=/"),
    ];
    world.run(async |keeper| {
        for params in &refused {
            let mut php = Php::start(&keeper).await;
            let said = php.say(params).await;
            assert_eq!(said, None, "{params:?}");
            php.guard.end().await.unwrap();
        }
        let mut php = Php::start(&keeper).await;
        for script in ["x.php", "own.php"] {
            assert_eq!(php.say(&named(&within(script))).await.as_deref(), Some("RAN"), "{script}");
        }
        // The same worker for the tenant's other site: that one's scripts, and no longer the first one's.
        keeper.enter(php.guard.id(), &site_name("more"), &Confinement::default()).await.unwrap();
        assert_eq!(php.say(&named(&text(&more.join("y.php")))).await.as_deref(), Some("RAN"));
        assert_eq!(php.say(&named(&within("x.php"))).await, None);
        php.guard.end().await.unwrap();
        // A site whose record names another root from now on.
        let mut php = Php::start(&keeper).await;
        let moved = json!({"kind": "php", "root": "more"});
        world.apply(vec![crate::world::site_change("php", "alice", moved, json!({}))]);
        assert_eq!(php.say(&named(&text(&more.join("y.php")))).await.as_deref(), Some("RAN"));
        assert_eq!(php.say(&named(&within("x.php"))).await, None);
    });
}

/// What a script does not read of a body, and what is sent behind its announced end.
fn no_request_in_a_body() {
    let world = World::new();
    // One block of 16 KiB is what PHP takes at once.
    let script =
        world.script("put.php", "<?php $in = fopen('php://input', 'r'); echo strlen(fread($in, 8));");
    let www = script.parent().unwrap().to_owned();
    let mark = world.home("alice").join("mark");
    let evil = world.home("alice").join("evil.php");
    std::fs::write(&evil, format!("<?php touch('{}');", mark.display())).unwrap();
    world.own(&evil, ALICE);
    let world = with_sites(world).start();
    world.run(async |keeper| {
        let mut php = Php::start(&keeper).await;
        let hidden = request(&[("SCRIPT_FILENAME", evil.to_str().unwrap()), ("REDIRECT_STATUS", "200")]);
        let body = [vec![b'x'; 16 << 10], hidden].concat();
        let script = script.to_str().unwrap();
        let len = body.len().to_string();
        let params = [
            ("SCRIPT_FILENAME", script),
            ("REQUEST_METHOD", "PUT"),
            ("REDIRECT_STATUS", "200"),
            ("CONTENT_TYPE", "text/x"),
            ("CONTENT_LENGTH", len.as_str()),
        ];
        php.stream.write_all(&opening(&params)).await.unwrap();
        php.stream.write_all(&record(5, &body)).await.unwrap();
        assert!(read_answer(&mut php.stream).await.unwrap().0.ends_with("\r\n\r\n8"));
        // The next one is answered as itself, by the same worker, and by then the hidden one would have run.
        let params = [("SCRIPT_FILENAME".to_owned(), www.join("put.php"))];
        let params = params.map(|(_, path)| ("SCRIPT_FILENAME", path.to_str().unwrap().to_owned()));
        assert_eq!(php.say(&params).await.as_deref(), Some("0"));
        assert!(!mark.exists(), "what was in a body has run");
        // A hostile edge announces less than it sends.
        let mut php = php.replace(&keeper).await;
        let params = [("SCRIPT_FILENAME", script), ("REDIRECT_STATUS", "200"), ("CONTENT_LENGTH", "8")];
        php.stream.write_all(&[opening(&params), record(5, &body)].concat()).await.unwrap();
        assert_eq!(read_answer(&mut php.stream).await, None);
        // Nor is anything taken that no request announces.
        let mut php = php.replace(&keeper).await;
        let hidden = request(&[("SCRIPT_FILENAME", evil.to_str().unwrap())]);
        let sent = [opening(&params[..2]), record(5, b"x"), hidden].concat();
        php.stream.write_all(&sent).await.unwrap();
        assert_eq!(read_answer(&mut php.stream).await, None);
        assert!(!mark.exists(), "what was in a body has run");
    });
}

/// A worker of alice's and its connection.
pub struct Php {
    pub stream: UnixStream,
    pub guard: ProcessGuard,
    pub cell: Box<str>,
    /// What was said of the use of the last request.
    pub report: UsageReport,
}

impl Php {
    async fn start(keeper: &KeeperClient) -> Self {
        Self::start_for(keeper, "php").await
    }

    /// For this site of hers.
    pub async fn start_for(keeper: &KeeperClient, site: &str) -> Self {
        Self::start_with(keeper, site, 0).await
    }

    /// As `start_for`, sharing the opcache of this number.
    pub async fn start_with(keeper: &KeeperClient, site: &str, opcache: u64) -> Self {
        let worker = keeper.spawn_php(&site_name(site), Some(opcache)).await.unwrap();
        let stream = UnixStream::from_std(worker.socket.into()).unwrap();
        Self { stream, guard: worker.guard, cell: worker.cell, report: UsageReport::Ask }
    }

    /// Another one once this has ended: a tenant has so many and no more.
    async fn replace(self, keeper: &KeeperClient) -> Self {
        drop(self);
        let started = async {
            loop {
                if let Ok(worker) = keeper.spawn_php(&site_name("php"), Some(0)).await {
                    let stream = UnixStream::from_std(worker.socket.into()).unwrap();
                    let report = UsageReport::Ask;
                    return Self { stream, guard: worker.guard, cell: worker.cell, report };
                }
            }
        };
        tokio::time::timeout(TIMEOUT, started).await.expect("the other one ends")
    }

    /// What is said to a `GET` with these parameters. None: nothing, and the connection ends.
    pub async fn say(&mut self, params: &[(&str, String)]) -> Option<String> {
        let mut all = vec![("REQUEST_METHOD", "GET"), ("REDIRECT_STATUS", "200")];
        all.extend(params.iter().map(|(name, value)| (*name, value.as_str())));
        self.stream.write_all(&opening(&all)).await.unwrap();
        let (answer, report) = read_answer(&mut self.stream).await?;
        self.report = report;
        Some(answer.split_once("\r\n\r\n").unwrap().1.to_owned())
    }

    /// What a script says, without its header.
    pub async fn ask(&mut self, script: &Path, query: &str) -> String {
        let params = [
            ("SCRIPT_FILENAME", script.to_str().unwrap()),
            ("REQUEST_METHOD", "GET"),
            ("QUERY_STRING", query),
            ("REDIRECT_STATUS", "200"),
        ];
        self.stream.write_all(&opening(&params)).await.unwrap();
        let (answer, report) = read_answer(&mut self.stream).await.unwrap();
        self.report = report;
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        assert!(head.contains("Content-type: text/html"), "{head}");
        body.to_owned()
    }

    /// Ends the request as the edge does, and gives its use.
    pub async fn leave(&self, keeper: &KeeperClient) -> RequestUsage {
        match self.report {
            UsageReport::Known(usage) => usage,
            UsageReport::Ask => keeper.leave(self.guard.id()).await.unwrap(),
        }
    }
}

/// A FastCGI request with the end of its body, FCGI_KEEP_CONN set (FastCGI 1.0, sections 3.3 and 5).
fn request(params: &[(&str, &str)]) -> Vec<u8> {
    [opening(params), record(5, &[])].concat()
}

/// Without its body.
pub fn opening(params: &[(&str, &str)]) -> Vec<u8> {
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
    out
}

fn record(kind: u8, content: &[u8]) -> Vec<u8> {
    let mut out = vec![1, kind, 0, 1];
    out.extend(u16::try_from(content.len()).unwrap().to_be_bytes());
    out.extend([0, 0]);
    out.extend(content);
    out
}

/// What the worker wrote to its standard output, until the end of the request, and what is said of its use. None: it
/// was not given the request.
async fn read_answer(stream: &mut UnixStream) -> Option<(String, UsageReport)> {
    let mut out = Vec::new();
    let mut has_ended = false;
    loop {
        let mut head = [0; 8];
        stream.read_exact(&mut head).await.ok()?;
        let len = usize::from(u16::from_be_bytes([head[4], head[5]])) + usize::from(head[6]);
        let mut content = vec![0; len];
        stream.read_exact(&mut content).await.unwrap();
        content.truncate(len - usize::from(head[6]));
        if has_ended {
            let mut record = BytesMut::from(&[&head[..], &content].concat()[..]);
            let report = UsageReport::take(&mut record).unwrap().expect("it is whole");
            return Some((String::from_utf8(out).unwrap(), report));
        }
        match head[1] {
            // The protocol's status: 2 is that it was not begun.
            3 if content[4] != 0 => return None,
            3 => has_ended = true,
            6 => out.extend(content),
            other => panic!("record of type {other}"),
        }
    }
}
