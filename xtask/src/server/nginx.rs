//! nginx: static sites in two forms, a proxy, a front of php-fpm, and the backend that all proxies
//! share.
//!
//! Not here: the other servers.

use std::net::SocketAddr;
use std::path::Path;

use anyhow::Result;

use super::{CONNECTIONS_MAX, OPEN_FILES_MAX, StartProbe, TestServer, make_dir, words, write};
use crate::content::population::SitePopulation;
use crate::facts;
use crate::http::free_address;

/// Form of the sites in nginx's configuration. Both are in use; the first serves faster, the second
/// needs less memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NginxForm {
    /// One `server` block for each site.
    Blocks,
    /// One `server` block with all the names, and a map from name to root.
    Names,
}

/// Idle connections that a proxy may keep to its backend per process.
const UPSTREAM_KEEP_ALIVE: u32 = 128;

/// Starts static sites.
pub fn sites(dir: &Path, population: &SitePopulation, form: NginxForm, log: bool) -> Result<TestServer> {
    let address = free_address()?;
    let mut body = match form {
        NginxForm::Blocks => {
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
        NginxForm::Names => {
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
    let probe = StartProbe { host: population.host(population.count / 2), path: "/hello.txt".into() };
    start(dir, address, &body, &probe)
}

/// Starts one static site over TLS and HTTP/2 at `secure`, and over plain HTTP/1.1 at the returned
/// address.
pub fn http2(
    dir: &Path,
    root: &Path,
    host: &str,
    secure: SocketAddr,
    certificate: &Path,
) -> Result<TestServer> {
    let address = free_address()?;
    let certificate = certificate.display();
    let body = format!(
        "access_log off;\n\
         server {{\n listen {address} reuseport;\n listen {secure} ssl http2 reuseport;\n server_name {host};\n \
         root {};\n ssl_certificate {certificate};\n ssl_certificate_key {certificate};\n \
         ssl_protocols TLSv1.2 TLSv1.3;\n ssl_session_cache shared:tls:10m;\n}}\n",
        root.display()
    );
    start(dir, address, &body, &StartProbe { host: host.into(), path: "/1k.bin".into() })
}

/// Starts a reverse proxy to `backend`.
pub fn proxy(dir: &Path, backend: SocketAddr) -> Result<TestServer> {
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
    start(dir, address, &body, &StartProbe { host: "application.example".into(), path: "/small".into() })
}

/// Starts a reverse proxy to `backend` that buffers bodies in both directions, nginx's default.
/// Uploads of this size are accepted.
pub fn buffering_proxy(dir: &Path, backend: SocketAddr, host: &str, upload_max: usize) -> Result<TestServer> {
    let address = free_address()?;
    // The backend closes each connection, so that none is kept to it.
    let body = format!(
        "access_log off;\n\
         server {{\n listen {address} reuseport;\n client_max_body_size {upload_max};\n location / {{\n  \
         proxy_pass http://{backend};\n  proxy_http_version 1.1;\n  proxy_set_header Connection \"\";\n  \
         proxy_set_header Host $host;\n  proxy_set_header X-Forwarded-For $proxy_add_x_forwarded_for;\n  \
         proxy_set_header X-Forwarded-Proto $scheme;\n  proxy_buffers 16 16k;\n  proxy_buffer_size 16k;\n }}\n}}\n"
    );
    start(dir, address, &body, &StartProbe { host: host.into(), path: "/".into() })
}

/// Starts the backend of every proxy: a small body from memory and a larger one from the page
/// cache.
pub fn backend(dir: &Path, root: &Path, small: &str) -> Result<TestServer> {
    let address = free_address()?;
    let body = format!(
        "access_log off;\n\
         server {{\n listen {address} reuseport;\n root {};\n location = /small {{ default_type text/plain; \
         return 200 \"{small}\"; }}\n}}\n",
        root.display()
    );
    start(dir, address, &body, &StartProbe { host: "application.example".into(), path: "/small".into() })
}

/// Starts a front of php-fpm on a Unix socket, as in DokuWiki's documentation.
pub fn php(dir: &Path, root: &Path, socket: &Path, probe: &StartProbe) -> Result<TestServer> {
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

fn start(dir: &Path, address: SocketAddr, body: &str, probe: &StartProbe) -> Result<TestServer> {
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
    TestServer::start(
        "nginx",
        &words(&["nginx", "-e", "stderr", "-p", &prefix, "-c", &file]),
        &dir,
        address,
        probe,
    )
}
