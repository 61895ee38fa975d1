//! nginx: static sites in two forms, a proxy, a front of php-fpm, and the backend that all proxies share.
//!
//! Not here: the other servers.

use std::path::Path;

use anyhow::Result;

use super::{CONNECTIONS_MAX, OPEN_FILES_MAX, Probe, Server, make_dir, words, write};
use crate::experiment::Population;
use crate::facts;
use crate::http::free_address;

/// How many sites are told to nginx. Both are in use; the first serves faster, the second needs less memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// One `server` block for each site.
    Blocks,
    /// One `server` block with all the names, and a map from name to root.
    Names,
}

/// Where a proxy finds its backend, and how many idle connections it may keep to it per process.
const UPSTREAM_KEEP_ALIVE: u32 = 128;

/// Static sites.
pub fn sites(dir: &Path, population: &Population, form: Form, log: bool) -> Result<Server> {
    let address = free_address()?;
    let mut body = match form {
        Form::Blocks => {
            let mut body = format!("server {{ listen {address} reuseport default_server; return 404; }}\n");
            for site in 0..population.count {
                body.push_str(&format!(
                    "server {{ listen {address}; server_name {}; root {}; }}\n",
                    population.host(site),
                    population.root(site).display()
                ));
            }
            body
        }
        Form::Names => {
            let mut map = String::from("map $host $site_root {\n");
            let mut names = String::new();
            for site in 0..population.count {
                let host = population.host(site);
                map.push_str(&format!("{host} {};\n", population.root(site).display()));
                names.push_str(&format!("{host}\n"));
            }
            format!(
                "map_hash_max_size 1048576;\nmap_hash_bucket_size 128;\n{map}}}\n\
                 server {{ listen {address} reuseport; root $site_root; server_name\n{names}; }}\n"
            )
        }
    };
    body.push_str(if log {
        "access_log access.log combined buffer=64k flush=1s;\n"
    } else {
        "access_log off;\n"
    });
    let probe = Probe { host: population.host(population.count / 2), path: "/hello.txt".into() };
    start(dir, address, &body, &probe)
}

/// A reverse proxy to `backend`.
pub fn proxy(dir: &Path, backend: std::net::SocketAddr) -> Result<Server> {
    let address = free_address()?;
    let body = format!(
        "access_log off;\n\
         upstream application {{ server {backend}; keepalive {UPSTREAM_KEEP_ALIVE}; keepalive_requests 1000000; }}\n\
         server {{\n listen {address} reuseport;\n location / {{\n  proxy_pass http://application;\n  \
         proxy_http_version 1.1;\n  proxy_set_header Connection \"\";\n  proxy_set_header Host $host;\n  \
         proxy_set_header X-Forwarded-For $proxy_add_x_forwarded_for;\n  \
         proxy_set_header X-Forwarded-Proto $scheme;\n  \
         # With the packaged 8 buffers of 4 KiB a body of 64 KiB would pass through a file on disk.\n  \
         proxy_buffers 16 16k;\n  proxy_buffer_size 16k;\n }}\n}}\n"
    );
    start(dir, address, &body, &Probe { host: "application.example".into(), path: "/small".into() })
}

/// What stands behind every proxy: a small body from memory and a larger one from the page cache.
pub fn backend(dir: &Path, root: &Path, small: &str) -> Result<Server> {
    let address = free_address()?;
    let body = format!(
        "access_log off;\n\
         server {{\n listen {address} reuseport;\n root {};\n location = /small {{ default_type text/plain; \
         return 200 \"{small}\"; }}\n}}\n",
        root.display()
    );
    start(dir, address, &body, &Probe { host: "application.example".into(), path: "/small".into() })
}

/// A front of php-fpm on a Unix socket, as DokuWiki's documentation has it.
pub fn php(dir: &Path, root: &Path, socket: &Path, probe: &Probe) -> Result<Server> {
    let address = free_address()?;
    let body = format!(
        "access_log off;\n\
         server {{\n listen {address} reuseport;\n root {};\n index index.php doku.php;\n \
         location ~ ^/(data|conf|bin|inc|vendor)/ {{ deny all; }}\n \
         location ~ \\.php$ {{\n  include /etc/nginx/fastcgi_params;\n  \
         fastcgi_param SCRIPT_FILENAME $document_root$fastcgi_script_name;\n  fastcgi_pass unix:{};\n  \
         fastcgi_buffers 32 16k;\n  fastcgi_buffer_size 32k;\n }}\n}}\n",
        root.display(),
        socket.display()
    );
    start(dir, address, &body, probe)
}

fn start(dir: &Path, address: std::net::SocketAddr, body: &str, probe: &Probe) -> Result<Server> {
    let dir = make_dir(dir, "nginx")?;
    let workers = facts::cores();
    let temporary: String = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
        .iter()
        .map(|name| format!("{name}_temp_path {}/{name};\n", dir.display()))
        .collect();
    let config = format!(
        "user www-data;\nworker_processes {workers};\nworker_rlimit_nofile {OPEN_FILES_MAX};\ndaemon off;\n\
         pid {0}/nginx.pid;\nerror_log stderr warn;\n\
         events {{ worker_connections {CONNECTIONS_MAX}; multi_accept on; }}\n\
         http {{\ninclude /etc/nginx/mime.types;\ndefault_type application/octet-stream;\n\
         sendfile on;\ntcp_nopush on;\ntcp_nodelay on;\nkeepalive_timeout 75s;\nkeepalive_requests 100000000;\n\
         open_file_cache max=20000 inactive=60s;\nopen_file_cache_valid 30s;\nopen_file_cache_errors on;\n\
         server_names_hash_max_size 1048576;\nserver_names_hash_bucket_size 128;\n{temporary}{body}}}\n",
        dir.display()
    );
    let file = dir.join("nginx.conf");
    write(&file, &config)?;
    let (prefix, file) = (dir.to_string_lossy(), file.to_string_lossy());
    Server::start(
        "nginx",
        &words(&["nginx", "-e", "stderr", "-p", &prefix, "-c", &file]),
        &dir,
        address,
        probe,
    )
}
