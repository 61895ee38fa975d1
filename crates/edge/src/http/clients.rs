//! Networks of clients: the number of connections of each, and its rates of requests and TLS
//! handshakes.

pub mod crowd;
pub mod limits;
pub mod network;
pub mod rate;
pub mod report;
