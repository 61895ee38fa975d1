//! The script of an application that nagaya's own request means, its parameters, and the status of
//! its response.
//!
//! The choice uses names alone: the script in the path, else the front controller, else the index
//! of the directory. Not here: the same for visitors' requests, which checks the files
//! (`edge::files`, `edge::programs`).

use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use nagaya_keeper_api::fastcgi::{ConnectionReuse, RequestOpening};
use nagaya_records::record::FileRoot;
use nagaya_records::{Site, Tenant};

use crate::fault::Fault;
use crate::paths::roots;

const INDEX: &str = "index.php";

/// The scripts of one site.
pub struct ScriptFinder {
    root: PathBuf,
    /// Path of the site, without a slash at its end.
    mount: String,
    extensions: Vec<String>,
    index: String,
    front_controller: Option<String>,
}

impl ScriptFinder {
    pub fn of(site: &Site, tenant: &Tenant, files: &FileRoot) -> Result<Self, Fault> {
        let mut extensions = files.extensions.clone();
        if extensions.is_empty() {
            extensions.push(".php".into());
        }
        let is_script = |name: &&String| extensions.iter().any(|extension| name.ends_with(extension));
        let index = files.index.iter().find(is_script).cloned().unwrap_or_else(|| INDEX.into());
        // As visitors' requests name it, because compiled code is cached under its name.
        let root = roots::root_path(files, tenant)?.components().collect();
        let mount = site.path.trim_end_matches('/').to_owned();
        Ok(Self { root, mount, extensions, index, front_controller: files.front_controller.clone() })
    }

    /// Returns the file below the root, and the rest of the path.
    fn find<'p>(&self, path: &'p str) -> (String, &'p str) {
        let path = path.strip_prefix(self.mount.as_str()).unwrap_or(path).trim_start_matches('/');
        let mut end = 0;
        for segment in path.split_inclusive('/') {
            let name = segment.trim_end_matches('/');
            if self.extensions.iter().any(|extension| name.ends_with(extension.as_str())) {
                let (file, rest) = path.split_at(end + name.len());
                return (file.to_owned(), rest);
            }
            end += segment.len();
        }
        let directory = path.rfind('/').map_or("", |slash| &path[..=slash]);
        let front = self.front_controller.clone();
        (front.unwrap_or_else(|| format!("{directory}{}", self.index)), "")
    }

    /// Builds a `GET` of this path.
    pub fn opening(&self, host: &str, target: &str) -> io::Result<Vec<u8>> {
        let (path, query) = target.split_once('?').unwrap_or((target, ""));
        let (file, rest) = self.find(path);
        let name = format!("{}/{file}", self.mount);
        let filename = self.root.join(&file);
        let mut opening = RequestOpening::new(ConnectionReuse::Closed);
        let variables: [(&str, &[u8]); 24] = [
            ("GATEWAY_INTERFACE", b"CGI/1.1"),
            ("SERVER_SOFTWARE", b"nagaya"),
            ("SERVER_PROTOCOL", b"HTTP/1.1"),
            ("SERVER_NAME", host.as_bytes()),
            ("SERVER_ADDR", b"127.0.0.1"),
            ("SERVER_PORT", b"443"),
            ("REMOTE_ADDR", b"127.0.0.1"),
            ("REQUEST_METHOD", b"GET"),
            ("REQUEST_SCHEME", b"https"),
            ("HTTPS", b"on"),
            ("REQUEST_URI", target.as_bytes()),
            ("QUERY_STRING", query.as_bytes()),
            ("DOCUMENT_ROOT", self.root.as_os_str().as_bytes()),
            ("SCRIPT_FILENAME", filename.as_os_str().as_bytes()),
            ("SCRIPT_NAME", name.as_bytes()),
            ("PATH_INFO", rest.as_bytes()),
            ("REDIRECT_STATUS", b"200"),
            ("HTTP_HOST", host.as_bytes()),
            ("HTTP_USER_AGENT", b"nagaya"),
            ("HTTP_ACCEPT", b"*/*"),
            ("HTTP_X_FORWARDED_FOR", b"127.0.0.1"),
            ("HTTP_X_FORWARDED_PROTO", b"https"),
            ("HTTP_X_FORWARDED_HOST", host.as_bytes()),
            ("HTTP_X_FORWARDED_PORT", b"443"),
        ];
        for (name, value) in variables.iter().filter(|(_, value)| !value.is_empty()) {
            opening.put(name.as_bytes(), value).map_err(io::Error::other)?;
        }
        Ok(opening.finish())
    }
}

/// Returns the status of a script's output, which begins with a head (RFC 3875 section 6.3).
pub fn status_of(output: &[u8]) -> io::Result<u16> {
    let invalid = || io::Error::new(io::ErrorKind::InvalidData, "its response has no head of a script");
    let mut status = 200;
    for (number, line) in output.split_inclusive(|byte| *byte == b'\n').enumerate() {
        let line = line.strip_suffix(b"\n").ok_or_else(invalid)?;
        let line = str::from_utf8(line.strip_suffix(b"\r").unwrap_or(line)).map_err(|_| invalid())?;
        if line.is_empty() && number > 0 {
            return Ok(status);
        }
        let (name, value) = line.split_once(':').ok_or_else(invalid)?;
        if name.eq_ignore_ascii_case("status") {
            let code = value.split_ascii_whitespace().next().and_then(|code| code.parse().ok());
            status = code.filter(|code| (200..=599).contains(code)).ok_or_else(invalid)?;
        }
    }
    Err(invalid())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scripts(path: &str, files: &str) -> ScriptFinder {
        let backend = r#"{"kind":"app","command":["x"],"directory":"a"}"#;
        let site =
            format!(r#"{{"name":"s","tenant":"t","hosts":["s"],"path":"{path}","backend":{backend}}}"#);
        let tenant: Tenant =
            serde_json::from_str(r#"{"name":"t","uid":9,"gid":9,"home":"/home/t"}"#).unwrap();
        let files: FileRoot = serde_json::from_str(files).unwrap();
        ScriptFinder::of(&serde_json::from_str(&site).unwrap(), &tenant, &files).unwrap()
    }

    #[test]
    fn a_path_means_a_script() {
        let plain = scripts("/", r#"{"root":"./a/html/"}"#);
        assert_eq!(plain.root, PathBuf::from("/home/t/a/html"));
        for (path, file, rest) in [
            ("/", "index.php", ""),
            ("/wp-login.php", "wp-login.php", ""),
            ("/a/b.php/c/d.php", "a/b.php", "/c/d.php"),
            ("/wp-admin/", "wp-admin/index.php", ""),
            ("/wp-admin/x", "wp-admin/index.php", ""),
        ] {
            assert_eq!(plain.find(path), (file.to_owned(), rest), "{path}");
        }
        let mounted = scripts(
            "/blog",
            r#"{"root":"a","front_controller":"front.fcgi","extensions":[".fcgi"],"index":["a.html"]}"#,
        );
        for (path, file) in
            [("/blog", "front.fcgi"), ("/blog/2026/x/", "front.fcgi"), ("/blog/a.fcgi", "a.fcgi")]
        {
            assert_eq!(mounted.find(path), (file.to_owned(), ""), "{path}");
        }
    }

    #[test]
    fn a_status_is_in_the_head_or_is_200() {
        assert_eq!(status_of(b"Content-Type: a\r\n\r\nStatus: 500\r\n").unwrap(), 200);
        assert_eq!(status_of(b"A: b\nstatus:503 no\n\n").unwrap(), 503);
        for bad in
            [&b""[..], b"A: b\r\n", b"<html>\n\n", b"Status: 20\n\n", b"\n", b"A: \xff\n\n", b"A: b\n\r"]
        {
            assert!(status_of(bad).is_err(), "{}", bad.escape_ascii());
        }
    }
}
