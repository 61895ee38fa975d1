//! Finds the process of an instance that serves a connection. It is the one that holds the other
//! end, if it holds no other connection and has one thread. This fits prefork servers and all whose
//! workers serve one request at a time.
//!
//! The kernel reports the inode of the other end (sock_diag(7); for ports `/proc/PID/net/tcp`). The
//! instance's own processes are searched for an open descriptor of it. An end that nobody has
//! accepted yet has no inode. All of it blocks, briefly: call it from `workers`. Not here: what
//! happens to the process (`request_cells`).

use std::fs::{self, File};
use std::io::{self, Read};
use std::sync::Arc;

use nagaya_keeper_api::protocol::ConnectionId;
use rustix::process::Pid;

use crate::cells::Leaf;
use crate::netlink::sock_diag::SockDiag;

pub use crate::netlink::sock_diag::is_there as unix_diag;

/// Maximum number of processes that are searched, and of descriptors of each. An instance with more
/// keeps its own limits.
const PROCESSES_MAX: usize = 512;
const DESCRIPTORS_MAX: usize = 4096;

/// Maximum number of bytes read of a table of connections: some seven thousand lines.
const TABLE_LEN_MAX: u64 = 1 << 20;

/// The state of a listening socket, in both families (include/net/tcp_states.h).
const LISTENS: u8 = 10;

/// A connection whose other end is searched, and where.
#[derive(Debug, Clone)]
pub struct HolderQuery {
    line: ConnectionId,
    /// Port on which the instance listens, if any.
    port: Option<u16>,
}

/// The holder of the other end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ConnectionHolder {
    /// Nobody has accepted it yet.
    Nobody,
    /// This process, which serves nothing else.
    One(Pid),
    /// Several processes, or none of those searched. It is being handed from one to another, they
    /// share it, or it does not lead to this instance.
    Several,
    /// A process that serves, or can serve, several requests at once.
    Shared,
}

/// The other end, as the kernel reports it.
enum PeerEnd {
    Unix { diag: SockDiag, inode: u64, name: Vec<u8> },
    Tcp { inode: u64, others: Vec<u64> },
}

impl HolderQuery {
    /// Returns `None` if it cannot lead to this instance.
    pub fn new(line: ConnectionId, port: Option<u16>) -> Option<Self> {
        matches!((line, port), (ConnectionId::Unix { .. }, None) | (ConnectionId::Tcp { .. }, Some(_)))
            .then_some(Self { line, port })
    }

    /// Searches the processes in these cells.
    pub fn holder(&self, leaves: &[Arc<Leaf>]) -> io::Result<ConnectionHolder> {
        let mut pids = Vec::new();
        for leaf in leaves {
            pids.extend(leaf.pids()?);
        }
        if pids.len() > PROCESSES_MAX {
            return Ok(ConnectionHolder::Shared);
        }
        let Some(end) = pids.first().map_or(Ok(None), |any| self.end(*any))? else {
            return Ok(ConnectionHolder::Nobody);
        };
        // A process that has ended meanwhile holds nothing.
        let held = |pid: Pid| Some((pid, sockets(pid).ok()?)).filter(|(_, held)| held.contains(&end.inode()));
        let mut holders = pids.into_iter().filter_map(held);
        match (holders.next(), holders.next()) {
            (None, _) | (Some(_), Some(_)) => Ok(ConnectionHolder::Several),
            (Some((pid, held)), None) if is_alone(pid)? && !end.has_others(&held)? => {
                Ok(ConnectionHolder::One(pid))
            }
            (Some(_), None) => Ok(ConnectionHolder::Shared),
        }
    }

    /// Returns the end of the connection. `any` is a process of the instance.
    fn end(&self, any: Pid) -> io::Result<Option<PeerEnd>> {
        match (self.line, self.port) {
            (ConnectionId::Unix { inode }, _) => {
                let diag = SockDiag::open()?;
                // Not there: it was closed.
                let Some(peer) = diag.ask(inode)?.ok_or(io::ErrorKind::NotFound)?.peer else {
                    return Ok(None);
                };
                let Some(found) = diag.ask(peer)? else { return Ok(None) };
                Ok(Some(PeerEnd::Unix { diag, inode: peer.into(), name: found.name }))
            }
            (ConnectionId::Tcp { port }, own) => {
                let mut rows = Vec::new();
                for table in ["tcp", "tcp6"] {
                    let mut text = String::new();
                    let path = format!("/proc/{}/net/{table}", any.as_raw_nonzero());
                    match File::open(path) {
                        Ok(file) => file.take(TABLE_LEN_MAX).read_to_string(&mut text)?,
                        // A kernel without the second family.
                        Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                        Err(error) => return Err(error),
                    };
                    rows.extend(text.lines().filter_map(ProcTcpRow::parse));
                }
                let accepted =
                    |row: &&ProcTcpRow| Some(row.local) == own && row.state != LISTENS && row.inode != 0;
                let Some(ours) = rows.iter().filter(accepted).find(|row| row.remote == port) else {
                    return Ok(None);
                };
                let others = rows.iter().filter(accepted).filter(|row| row.inode != ours.inode);
                Ok(Some(PeerEnd::Tcp { inode: ours.inode, others: others.map(|row| row.inode).collect() }))
            }
        }
    }
}

impl PeerEnd {
    fn inode(&self) -> u64 {
        match self {
            Self::Unix { inode, .. } | Self::Tcp { inode, .. } => *inode,
        }
    }

    /// Whether one of these sockets is another connection to where the instance listens.
    fn has_others(&self, held: &[u64]) -> io::Result<bool> {
        match self {
            Self::Tcp { others, .. } => Ok(held.iter().any(|inode| others.contains(inode))),
            Self::Unix { diag, inode: own, name } => {
                for inode in held.iter().filter(|inode| *inode != own) {
                    // A connection within the sandbox' network is not one of the keeper's, and is
                    // not found here.
                    let found = u32::try_from(*inode).map_or(Ok(None), |inode| diag.ask(inode))?;
                    if found.is_some_and(|found| found.name == *name && found.state != LISTENS) {
                        return Ok(true);
                    }
                }
                Ok(false)
            }
        }
    }
}

/// Whether a process has one thread.
fn is_alone(pid: Pid) -> io::Result<bool> {
    match fs::read_dir(format!("/proc/{}/task", pid.as_raw_nonzero())) {
        Ok(tasks) => Ok(tasks.take(2).count() < 2),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(true),
        Err(error) => Err(error),
    }
}

/// Returns the inode numbers of the sockets that a process has open.
fn sockets(pid: Pid) -> io::Result<Vec<u64>> {
    let open = fs::read_dir(format!("/proc/{}/fd", pid.as_raw_nonzero()))?;
    let links = open.take(DESCRIPTORS_MAX).flatten().filter_map(|fd| fs::read_link(fd.path()).ok());
    let inode = |link: &str| link.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok();
    Ok(links.filter_map(|link| inode(link.to_str()?)).collect())
}

/// A line of `/proc/PID/net/tcp` (proc_pid_net(5)), reduced to the needed fields.
#[derive(Debug, PartialEq, Eq)]
struct ProcTcpRow {
    local: u16,
    remote: u16,
    state: u8,
    inode: u64,
}

impl ProcTcpRow {
    fn parse(line: &str) -> Option<Self> {
        let mut fields = line.split_ascii_whitespace().skip(1);
        let mut port = || u16::from_str_radix(fields.next()?.rsplit_once(':')?.1, 16).ok();
        let (local, remote) = (port()?, port()?);
        let state = u8::from_str_radix(fields.next()?, 16).ok()?;
        let inode = fields.nth(5)?.parse().ok()?;
        Some(Self { local, remote, state, inode })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_of_connections_is_read_by_its_columns() {
        let table = "\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 4711 1 0000 100 0 0 10 0
   1: 0100007F:1F90 0100007F:C350 01 00000000:00000000 00:00000000 00000000  1000        0 4712 1 0000 20 4 30 10 -1
   2: nonsense
";
        let rows: Vec<ProcTcpRow> = table.lines().filter_map(ProcTcpRow::parse).collect();
        assert_eq!(
            rows,
            [
                ProcTcpRow { local: 8080, remote: 0, state: LISTENS, inode: 4711 },
                ProcTcpRow { local: 8080, remote: 50_000, state: 1, inode: 4712 },
            ]
        );
    }

    #[test]
    fn a_connection_of_the_other_kind_leads_nowhere() {
        assert!(HolderQuery::new(ConnectionId::Unix { inode: 1 }, Some(80)).is_none());
        assert!(HolderQuery::new(ConnectionId::Tcp { port: 1 }, None).is_none());
    }
}
