//! Name resolution for a sandbox that reaches all outside: its queries go unchanged to the node's
//! own resolver.
//!
//! Nothing in them is read. The first resolver that responds answers each query, or none does, and
//! then the application repeats it. Not here: the resolver's address in the sandbox
//! (`sandbox::RESOLVER`), names in records (`endpoint`).

use std::fmt;
use std::fs;
use std::future::pending;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::{TcpStream, UdpSocket};
use tokio::sync::Semaphore;
use tokio::task::{JoinSet, spawn_blocking};
use tokio::time::{sleep, timeout};

use super::counts::RelayCounts;
use super::tcp::TcpTarget;

/// File with the node's resolvers (resolv.conf(5)).
const RESOLVERS: &str = "/etc/resolv.conf";

/// Maximum number of them, as in the C library.
const RESOLVERS_MAX: usize = 3;

/// The port of name servers.
const PORT: u16 = 53;

/// Maximum number of queries of one instance that wait for responses. Further ones are not accepted
/// before one of these is done.
const QUESTIONS_MAX: usize = 64;

/// The same for all instances, because each has a descriptor and a buffer of the keeper's. Further
/// ones are not sent.
pub const NODE_QUESTIONS_MAX: usize = 1024;

/// Pause after a query was not received: the cause may last.
const RECEIVE_PAUSE: Duration = Duration::from_millis(100);

/// Maximum time for one of the node's resolvers.
const ANSWER_MAX: Duration = Duration::from_secs(3);

/// The longest datagram.
const DATAGRAM_MAX: usize = 65_535;

/// Answers short queries while it is polled. `of_all` has `NODE_QUESTIONS_MAX` permits.
pub async fn answer(questions: OwnedFd, counts: Arc<RelayCounts>, of_all: Arc<Semaphore>) {
    let socket = match UdpSocket::from_std(questions.into()) {
        Ok(socket) => Rc::new(socket),
        Err(error) => {
            counts.failed(format!("names: {error}"));
            return pending().await;
        }
    };
    let permits = Arc::new(Semaphore::new(QUESTIONS_MAX));
    // They end with this.
    let mut asked = JoinSet::new();
    let mut buffer = vec![0; DATAGRAM_MAX];
    loop {
        let permit = Arc::clone(&permits).acquire_owned().await;
        while asked.try_join_next().is_some() {}
        let (len, from) = match socket.recv_from(&mut buffer).await {
            Ok(received) => received,
            Err(error) => {
                counts.failed(format!("names: {error}"));
                sleep(RECEIVE_PAUSE).await;
                continue;
            }
        };
        let Ok(permit_of_all) = Arc::clone(&of_all).try_acquire_owned() else {
            counts.failed("names: the node has reached its limit of waiting queries".into());
            continue;
        };
        let (question, socket, counts) = (buffer[..len].to_vec(), Rc::clone(&socket), Arc::clone(&counts));
        asked.spawn_local(async move {
            match ask(&question).await {
                Ok(answer) => drop(socket.send_to(&answer, from).await),
                Err(error) => counts.failed(format!("names: {error}")),
            }
            drop((permit, permit_of_all));
        });
    }
}

async fn ask(question: &[u8]) -> io::Result<Vec<u8>> {
    let mut last = io::Error::from(io::ErrorKind::NotFound);
    for resolver in resolvers().await {
        match timeout(ANSWER_MAX, ask_one(resolver, question)).await {
            Ok(Ok(answer)) => return Ok(answer),
            Ok(Err(error)) => last = io::Error::new(error.kind(), format!("{resolver}: {error}")),
            Err(_) => last = io::Error::new(io::ErrorKind::TimedOut, format!("{resolver} does not answer")),
        }
    }
    Err(last)
}

async fn ask_one(resolver: SocketAddr, question: &[u8]) -> io::Result<Vec<u8>> {
    let any = if resolver.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
    let socket = UdpSocket::bind(any).await?;
    // Only its datagrams are received.
    socket.connect(resolver).await?;
    socket.send(question).await?;
    let mut answer = vec![0; DATAGRAM_MAX];
    let len = socket.recv(&mut answer).await?;
    answer.truncate(len);
    Ok(answer)
}

/// Reads the node's own file.
async fn resolvers() -> Vec<SocketAddr> {
    let text = spawn_blocking(|| fs::read_to_string(RESOLVERS)).await;
    read(&text.ok().and_then(Result::ok).unwrap_or_default())
}

fn read(text: &str) -> Vec<SocketAddr> {
    let named = text.lines().filter_map(|line| {
        let mut words = line.split_ascii_whitespace();
        let address = (words.next()? == "nameserver").then(|| words.next())??;
        Some(SocketAddr::new(address.parse().ok()?, PORT))
    });
    let mut found: Vec<SocketAddr> = named.take(RESOLVERS_MAX).collect();
    if found.is_empty() {
        found.push(SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), PORT));
    }
    found
}

/// Queries whose responses are too long for one datagram.
pub struct LongQuestions;

impl fmt::Display for LongQuestions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("names")
    }
}

impl TcpTarget for LongQuestions {
    async fn connect(&self, _: &TcpStream) -> io::Result<TcpStream> {
        TcpStream::connect(&resolvers().await[..]).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nodes_resolvers_are_read_as_the_c_library_does() {
        let text = "# nameserver 9.9.9.9\nsearch x\nnameserver 192.0.2.1\n nameserver\t2001:db8::1 \nnameserver nonsense\n";
        let expected: Vec<SocketAddr> =
            vec!["192.0.2.1:53".parse().unwrap(), "[2001:db8::1]:53".parse().unwrap()];
        assert_eq!(read(text), expected);
        assert_eq!(read(""), ["127.0.0.1:53".parse().unwrap()]);
        assert_eq!(read(&"nameserver 192.0.2.1\n".repeat(9)).len(), RESOLVERS_MAX);
    }

    #[tokio::test]
    async fn name_lookup_over_the_nodes_limit_is_not_asked() {
        let socket = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        socket.set_nonblocking(true).unwrap();
        let application = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        application.send_to(b"a question", socket.local_addr().unwrap()).await.unwrap();
        let counts = Arc::new(RelayCounts::default());
        let answering = answer(socket.into(), Arc::clone(&counts), Arc::new(Semaphore::new(0)));
        let is_said = || {
            counts
                .last_failure
                .lock()
                .as_ref()
                .is_some_and(|why| why.contains("reached its limit of waiting queries"))
        };
        let said = async {
            while !is_said() {
                tokio::task::yield_now().await;
            }
        };
        tokio::select! {
            () = answering => {}
            () = said => {}
        }
        assert_eq!(counts.failed.load(std::sync::atomic::Ordering::Relaxed), 1);
    }
}
