//! A keeper that is made up: it speaks the keeper's protocol and answers as the test says.

use std::os::fd::AsFd;
use std::path::PathBuf;

use nagaya_keeper_api::codec;
use nagaya_keeper_api::codec::CodecError;
use nagaya_keeper_api::protocol::{KeeperMessage, PROTOCOL_VERSION, Verb, VerbCall, VerbReply};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use tempfile::TempDir;
use tokio::io::Interest;
use tokio::net::{UnixListener, UnixStream};

use super::*;

type Replying = Pin<Box<dyn Future<Output = (VerbReply, Option<OwnedFd>)>>>;

/// Where it is reached.
pub fn keeper(reply: impl Fn(Verb) -> Replying + 'static) -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("keeper");
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let listener = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
    rustix::net::bind(&listener, &SocketAddrUnix::new(&path).unwrap()).unwrap();
    rustix::net::listen(&listener, 8).unwrap();
    let listener = UnixListener::from_std(listener.into()).unwrap();
    let reply = Rc::new(reply);
    spawn_local(async move {
        loop {
            let (connection, _) = listener.accept().await.unwrap();
            spawn_local(converse(Rc::new(connection), Rc::clone(&reply)));
        }
    });
    (dir, path)
}

async fn converse(connection: Rc<UnixStream>, reply: Rc<impl Fn(Verb) -> Replying + 'static>) {
    let mut buffer = Vec::new();
    loop {
        connection.readable().await.unwrap();
        let received = connection.try_io(Interest::READABLE, || {
            codec::receive::<VerbCall>(&*connection, &mut buffer).map_err(|error| match error {
                CodecError::NotReady => io::ErrorKind::WouldBlock.into(),
                error => io::Error::other(error),
            })
        });
        let VerbCall { tag, verb } = match received {
            Ok((ask, _)) => ask,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
            Err(_closed) => return,
        };
        let (connection, reply) = (Rc::clone(&connection), Rc::clone(&reply));
        spawn_local(async move {
            let (reply, descriptor) = match verb {
                Verb::Hello { .. } => (VerbReply::Hello { version: PROTOCOL_VERSION }, None),
                // They have no answer.
                Verb::LeaveInstance { .. } | Verb::Answered { .. } | Verb::Forget { .. } => return,
                verb => reply(verb).await,
            };
            let bytes = codec::encode(&KeeperMessage::Reply { tag, reply }).unwrap();
            let descriptors: Vec<_> = descriptor.iter().map(AsFd::as_fd).collect();
            // The node may have been ended.
            let _ = codec::send(&*connection, &bytes, &descriptors);
        });
    }
}
