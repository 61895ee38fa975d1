//! The listening sockets. The supervisor makes and keeps them, so that the end of a process closes
//! none of them.
//!
//! Not here: accepting (`nagaya_edge`, `nagaya_keeper`, `admin`), passing them on (`child`).

use std::fs::Permissions;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::time::Duration;

use nagaya_edge::options::EdgeLimits;
use rustix::fs::Mode;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use socket2::{Domain, Protocol, Socket, Type};

use super::error::ServeError;
use crate::config::settings::ListenSettings;

/// Connections that the kernel holds per socket until the edge accepts them; `net.core.somaxconn`
/// may limit it further. It covers a second of new connections, while an edge is being restarted.
const BACKLOG: i32 = 16_384;

/// Unaccepted connections to the keeper: one per edge thread, and again as many while an edge
/// restarts.
const KEEPER_BACKLOG: i32 = 1_024;

/// Unaccepted connections to the admin socket. Above it, connecting fails at once, for root, too.
const ADMIN_BACKLOG: i32 = 1_024;

/// Probes before the other end counts as gone. They are packets like others, and one or two of them
/// may be lost.
const PROBES: u32 = 3;

/// Resolution of the kernel's probe times: seconds.
const PROBE_MIN: Duration = Duration::from_secs(1);

/// One address with its sockets, one per edge thread.
#[derive(Debug)]
pub struct BoundSockets {
    /// The configured value.
    pub wanted: ListenSettings,
    /// The real address: a configured port 0 becomes the port that the kernel chose.
    pub address: SocketAddr,
    pub sockets: Vec<OwnedFd>,
}

/// Makes the sockets of every address, `threads` for each.
pub fn listen(
    wanted: &[ListenSettings],
    threads: usize,
    limits: &EdgeLimits,
) -> Result<Vec<BoundSockets>, ServeError> {
    let mut made = Vec::with_capacity(wanted.len());
    for listen in wanted {
        match listen_at(listen, threads, limits) {
            Ok(listening) => made.push(listening),
            Err(error) if listen.by_default && is_family_missing(&error) => {
                tracing::info!(address = %listen.address, "not listening here: this machine has no IPv6");
            }
            Err(error) => {
                return Err(ServeError::Listen {
                    address: listen.address,
                    hint: hint(&error, listen),
                    error,
                });
            }
        }
    }
    Ok(made)
}

fn listen_at(listen: &ListenSettings, threads: usize, limits: &EdgeLimits) -> io::Result<BoundSockets> {
    // With `SO_REUSEPORT` a second node of the same user would share the address. Each would get
    // some of the connections. Without it, a socket is refused an address that is in use.
    let probe = socket(listen.address)?;
    probe.bind(&listen.address.into())?;
    let address = probe.local_addr()?.as_socket().unwrap_or(listen.address);
    drop(probe);
    let mut sockets = Vec::with_capacity(threads);
    for _ in 0..threads {
        let socket = socket(address)?;
        socket.set_reuse_port(true)?;
        expect_signs(&socket, limits)?;
        socket.bind(&address.into())?;
        socket.listen(BACKLOG)?;
        sockets.push(socket.into());
    }
    Ok(BoundSockets { wanted: listen.clone(), address, sockets })
}

fn socket(address: SocketAddr) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    // Connections of an earlier node may still linger in `TIME_WAIT`.
    socket.set_reuse_address(true)?;
    if address.is_ipv6() {
        socket.set_only_v6(true)?;
    }
    // Accepted connections inherit both.
    socket.set_nonblocking(true)?;
    socket.set_tcp_nodelay(true)?;
    Ok(socket)
}

/// Sets keepalive for connections that are accepted from now on. They end when the machine at their
/// other end is gone. One that has lost its power or its network closes nothing. It would keep its
/// position in a queue for ever.
pub fn expect_signs(socket: impl AsFd, limits: &EdgeLimits) -> io::Result<()> {
    use rustix::net::sockopt;
    let vanished = Duration::from_millis(limits.vanished_ms);
    // Half of the time is silence, the other half the probes.
    let idle = vanished / 2;
    let between = vanished / 2 / PROBES;
    sockopt::set_socket_keepalive(&socket, true)?;
    sockopt::set_tcp_keepidle(&socket, idle.max(PROBE_MIN))?;
    sockopt::set_tcp_keepintvl(&socket, between.max(PROBE_MIN))?;
    sockopt::set_tcp_keepcnt(&socket, PROBES)?;
    // There are no probes while sent data is not acknowledged. Such data would be sent again for a
    // quarter of an hour. This limits that, and replaces the probe count. It also ends connections
    // that accept no data for the moment, which is the edge's decision.
    let unacknowledged = limits.vanished_ms.max(limits.idle_body_ms);
    sockopt::set_tcp_user_timeout(&socket, u32::try_from(unacknowledged).unwrap_or(u32::MAX))?;
    Ok(())
}

fn is_family_missing(error: &io::Error) -> bool {
    let errno = rustix::io::Errno::from_io_error(error);
    matches!(errno, Some(rustix::io::Errno::AFNOSUPPORT | rustix::io::Errno::ADDRNOTAVAIL))
}

fn hint(error: &io::Error, listen: &ListenSettings) -> String {
    let port = listen.address.port();
    match error.kind() {
        io::ErrorKind::AddrInUse => {
            format!("another program has it: `ss -ltnp 'sport = :{port}'` shows which")
        }
        io::ErrorKind::PermissionDenied => {
            format!(
                "ports below 1024 need root or CAP_NET_BIND_SERVICE; without them use a port from 1024, not {port}"
            )
        }
        io::ErrorKind::AddrNotAvailable => "no interface has this address: `ip address` lists them".into(),
        _ => "see `nagaya doctor`".into(),
    }
}

/// Where other nodes reach the edge: one port, TCP and UDP.
#[derive(Debug)]
pub struct PeerSocketsFile {
    /// A configured port 0 becomes the port that the kernel chose.
    pub address: SocketAddr,
    /// One per edge thread.
    pub streams: Vec<OwnedFd>,
    pub probes: OwnedFd,
}

/// How often the kernel's port for TCP may turn out to be in use for UDP.
const PORT_TRIES_MAX: u32 = 16;

pub fn listen_peers(
    address: SocketAddr,
    threads: usize,
    limits: &EdgeLimits,
) -> Result<PeerSocketsFile, ServeError> {
    let wanted = ListenSettings { tls: true, ..ListenSettings::plain(address) };
    let mut tries = 0;
    let made = loop {
        tries += 1;
        let made = listen_at(&wanted, threads, limits).and_then(|listening| {
            let probes = Socket::new(Domain::for_address(address), Type::DGRAM, Some(Protocol::UDP))?;
            if address.is_ipv6() {
                probes.set_only_v6(true)?;
            }
            probes.set_nonblocking(true)?;
            probes.bind(&listening.address.into())?;
            Ok(PeerSocketsFile {
                address: listening.address,
                streams: listening.sockets,
                probes: probes.into(),
            })
        });
        if made.is_ok() || address.port() != 0 || tries == PORT_TRIES_MAX {
            break made;
        }
    };
    made.map_err(|error| ServeError::Listen { address, hint: hint(&error, &wanted), error })
}

/// Makes the keeper's seqpacket socket. Only `owner` (the edge's uid) and root may connect.
pub fn listen_keeper(path: &Path, owner: Option<(u32, u32)>) -> Result<OwnedFd, ServeError> {
    let failed = |error: io::Error| ServeError::Socket { path: path.into(), error };
    let socket = bind_closed(path, SocketType::SEQPACKET).map_err(failed)?;
    restrict(path, 0o600, owner).map_err(failed)?;
    rustix::net::listen(&socket, KEEPER_BACKLOG).map_err(|error| failed(error.into()))?;
    Ok(socket)
}

/// Users that may connect to the admin interface. Permissions are checked for each request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AdminAudience {
    Owner,
    Group(u32),
    /// Several users or groups have roles, and a file has one group.
    Everybody,
}

/// Makes the admin interface's socket. At no moment can unauthorised users connect. It is made for
/// its owner alone, and opened to others before it listens.
pub fn listen_admin(
    path: &Path,
    audience: AdminAudience,
) -> Result<std::os::unix::net::UnixListener, ServeError> {
    let failed = |error: io::Error| ServeError::Socket { path: path.into(), error };
    if let Some(parent) = path.parent() {
        std::fs::create_dir_all(parent).map_err(failed)?;
    }
    let socket = bind_closed(path, SocketType::STREAM).map_err(failed)?;
    let (group, mode) = match audience {
        AdminAudience::Owner => (None, 0o600),
        AdminAudience::Group(gid) => (Some(gid), 0o660),
        AdminAudience::Everybody => (None, 0o666),
    };
    std::os::unix::fs::chown(path, None, group).map_err(failed)?;
    restrict(path, mode, None).map_err(failed)?;
    rustix::net::listen(&socket, ADMIN_BACKLOG).map_err(|error| failed(error.into()))?;
    Ok(socket.into())
}

/// Binds a socket in the place of a leftover one. Its file has mode 0600 from the first moment,
/// whatever the umask. The kernel takes the mode from the socket (unix(7) does not say so;
/// `unix_bind_bsd` of net/unix/af_unix.c does).
fn bind_closed(path: &Path, kind: SocketType) -> io::Result<OwnedFd> {
    remove_stale(path)?;
    let address = SocketAddrUnix::new(path)?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, kind, flags, None)?;
    rustix::fs::fchmod(&socket, Mode::RUSR | Mode::WUSR)?;
    rustix::net::bind(&socket, &address)?;
    Ok(socket)
}

/// Removes the socket of a killed node. Anything but a socket stays: it is not ours.
fn remove_stale(path: &Path) -> io::Result<()> {
    use std::os::unix::fs::FileTypeExt as _;
    match std::fs::symlink_metadata(path) {
        Ok(meta) if meta.file_type().is_socket() => std::fs::remove_file(path),
        Ok(_) => Err(io::Error::new(io::ErrorKind::AlreadyExists, "something that is not a socket is there")),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
    }
}

fn restrict(path: &Path, mode: u32, owner: Option<(u32, u32)>) -> io::Result<()> {
    if let Some((uid, gid)) = owner {
        std::os::unix::fs::chown(path, Some(uid), Some(gid))?;
    }
    std::fs::set_permissions(path, Permissions::from_mode(mode))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn anywhere() -> ListenSettings {
        ListenSettings::plain(([127, 0, 0, 1], 0).into())
    }

    #[test]
    fn all_threads_listen_on_the_one_port_the_kernel_chose() {
        let made = listen(&[anywhere()], 3, &EdgeLimits::default()).unwrap();
        assert_ne!(made[0].address.port(), 0);
        assert_eq!(made[0].sockets.len(), 3);
        for socket in &made[0].sockets {
            let address = rustix::net::getsockname(socket).unwrap();
            assert_eq!(SocketAddr::try_from(address).unwrap(), made[0].address);
            assert!(rustix::net::sockopt::socket_acceptconn(socket).unwrap());
        }
    }

    #[test]
    fn accepted_connections_are_asked_for_signs() {
        use rustix::net::sockopt;
        let limits = EdgeLimits { vanished_ms: 60_000, idle_body_ms: 90_000, ..EdgeLimits::default() };
        let made = listen(&[anywhere()], 1, &limits).unwrap();
        let accepted = || {
            let _client = std::net::TcpStream::connect(made[0].address).unwrap();
            rustix::net::accept(&made[0].sockets[0]).unwrap()
        };
        let seconds = Duration::from_secs;
        let connection = accepted();
        assert!(sockopt::socket_keepalive(&connection).unwrap());
        assert_eq!(sockopt::tcp_keepidle(&connection).unwrap(), seconds(30));
        assert_eq!(sockopt::tcp_keepintvl(&connection).unwrap(), seconds(10));
        assert_eq!(sockopt::tcp_keepcnt(&connection).unwrap(), PROBES);
        assert_eq!(sockopt::tcp_user_timeout(&connection).unwrap(), 90_000);
        // Limits that change hold for who connects after that.
        expect_signs(&made[0].sockets[0], &EdgeLimits { vanished_ms: 2_000, idle_body_ms: 100, ..limits })
            .unwrap();
        let connection = accepted();
        assert_eq!(sockopt::tcp_keepidle(&connection).unwrap(), seconds(1));
        assert_eq!(sockopt::tcp_keepintvl(&connection).unwrap(), seconds(1));
        assert_eq!(sockopt::tcp_user_timeout(&connection).unwrap(), 2_000);
    }

    #[test]
    fn an_address_that_another_node_has_is_refused_and_not_shared() {
        let first = listen(&[anywhere()], 2, &EdgeLimits::default()).unwrap();
        let again = ListenSettings { address: first[0].address, ..anywhere() };
        let error = listen(&[again], 2, &EdgeLimits::default()).unwrap_err();
        assert!(error.to_string().contains("ss -ltnp"), "{error}");
    }

    #[test]
    fn other_nodes_ask_at_one_port() {
        let limits = EdgeLimits::default();
        let peers = listen_peers(([127, 0, 0, 1], 0).into(), 2, &limits).unwrap();
        assert_eq!(peers.streams.len(), 2);
        let address = rustix::net::getsockname(&peers.probes).unwrap();
        assert_eq!(SocketAddr::try_from(address).unwrap(), peers.address);
        assert!(listen_peers(peers.address, 1, &limits).is_err(), "a second node does not share it");
    }

    #[test]
    fn a_socket_is_closed_to_others_from_its_first_moment() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("closed.sock");
        let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
        let bound = bind_closed(&path, SocketType::STREAM).unwrap();
        assert_eq!(mode(&path), 0o600, "before anything else is said about it");
        let refused = std::os::unix::net::UnixStream::connect(&path).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::ConnectionRefused, "nobody listens yet");
        drop(bound);
        for (audience, expected) in [(AdminAudience::Owner, 0o600), (AdminAudience::Everybody, 0o666)] {
            let _listener = listen_admin(&path, audience).unwrap();
            assert_eq!(mode(&path), expected);
            std::os::unix::net::UnixStream::connect(&path).unwrap();
        }
    }

    #[test]
    fn a_stale_socket_is_replaced_and_a_file_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("keeper.sock");
        drop(listen_keeper(&path, None).unwrap());
        assert!(path.exists());
        let socket = listen_keeper(&path, None).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        drop(socket);
        let file = dir.path().join("file");
        std::fs::write(&file, "kept").unwrap();
        assert!(listen_keeper(&file, None).is_err());
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "kept");
    }
}
