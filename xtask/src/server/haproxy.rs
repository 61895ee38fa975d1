//! HAProxy as a reverse proxy.
//!
//! Not here: the other servers.

use std::net::SocketAddr;
use std::path::Path;

use anyhow::Result;

use super::{CONNECTIONS_MAX, StartProbe, TestServer, make_dir, words, write};
use crate::facts;
use crate::http::free_address;

/// Starts a reverse proxy to `backend`: a thread per core, connections to the backend shared by all
/// clients.
pub fn proxy(dir: &Path, backend: SocketAddr) -> Result<TestServer> {
    let dir = make_dir(dir, "haproxy")?;
    let address = free_address()?;
    let threads = facts::cores();
    let config = format!(
        "global\n  nbthread {threads}\n  maxconn {CONNECTIONS_MAX}\n  user haproxy\n  group haproxy\n\
         defaults\n  mode http\n  timeout connect 5s\n  timeout client 75s\n  timeout server 75s\n  \
         timeout http-keep-alive 75s\n  option http-keep-alive\n  http-reuse always\n  option forwardfor\n  \
         option splice-auto\n\
         frontend front\n  bind {address}\n  http-request set-header X-Forwarded-Proto http\n  \
         default_backend application\n\
         backend application\n  server one {backend} pool-max-conn -1\n"
    );
    let file = dir.join("haproxy.cfg");
    write(&file, &config)?;
    let command = words(&["haproxy", "-db", "-q", "-f", &file.to_string_lossy()]);
    let probe = StartProbe { host: "application.example".into(), path: "/small".into() };
    TestServer::start("haproxy", &command, &dir, address, &probe)
}
