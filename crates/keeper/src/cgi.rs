//! Names of CGI programs and their variables (RFC 3875).
//!
//! The edge sends both, and is not trusted: a name that could leave the root or a variable that
//! changes how a program is loaded (`variables`) ends here. Not here: opening and starting it
//! (`roots`, `spawn`).

use std::collections::BTreeMap;
use std::ffi::CString;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use nagaya_base::limits::SITE_PATH_LEN_MAX;
use nagaya_keeper_api::protocol::FailureKind;
use nagaya_keeper_api::variables::VariableOwner;
use nagaya_records::record::FileRoot;

use crate::fault::{self, Fault};

/// Search path of started programs.
pub const PATH: &str = "/usr/local/bin:/usr/bin:/bin";

/// File name extension of programs where the site names none.
const EXTENSION: &str = ".cgi";

/// Maximum number of variables from the edge: twice the usual limit of 100 headers, and the
/// meta-variables.
const VARIABLES_MAX: usize = 256;

/// Maximum length of the peer's text that is repeated in a message, characters.
const QUOTED_MAX: usize = 120;

/// Meta-variables of RFC 3875 section 4.1, and those that servers have added since.
const VARIABLES: [&str; 28] = [
    "AUTH_TYPE",
    "CONTENT_LENGTH",
    "CONTENT_TYPE",
    "GATEWAY_INTERFACE",
    "HTTPS",
    "PATH_INFO",
    "QUERY_STRING",
    "REDIRECT_QUERY_STRING",
    "REDIRECT_STATUS",
    "REDIRECT_URL",
    "REMOTE_ADDR",
    "REMOTE_HOST",
    "REMOTE_IDENT",
    "REMOTE_PORT",
    "REMOTE_USER",
    "REQUEST_METHOD",
    "REQUEST_SCHEME",
    "REQUEST_URI",
    "SCRIPT_NAME",
    "SCRIPT_URI",
    "SCRIPT_URL",
    "SERVER_ADDR",
    "SERVER_NAME",
    "SERVER_PORT",
    "SERVER_PROTOCOL",
    "SERVER_SOFTWARE",
    "TRACEPARENT",
    "UNIQUE_ID",
];

/// Known variables that are never taken from the edge. The keeper sets the first three itself. A
/// client could set the last one by a `Proxy` header, to redirect the program's own requests
/// (CVE-2016-5385).
const IGNORED: [&str; 4] = ["DOCUMENT_ROOT", "PATH_TRANSLATED", "SCRIPT_FILENAME", "HTTP_PROXY"];

/// Whether `script` is the name of a program of this site: relative, inside, and with the right
/// extension.
pub fn check_script(files: &FileRoot, script: &str) -> Result<(), Fault> {
    let refuse = |why: &str| {
        let message = format!("'{}' is not the name of a program here: {why}", quoted(script));
        Err(Fault::new(FailureKind::Invalid, fault::SCRIPT_NAME, message))
    };
    if script.is_empty() || script.len() > SITE_PATH_LEN_MAX {
        return refuse(&format!("it needs 1 to {SITE_PATH_LEN_MAX} bytes"));
    }
    if script.bytes().any(|b| b == 0) {
        return refuse("it has a NUL byte");
    }
    if script.split('/').any(|part| matches!(part, "" | "." | "..")) {
        return refuse("it must be relative, without empty parts, '.' and '..'");
    }
    let name = script.rsplit('/').next().unwrap_or(script);
    let named = if files.extensions.is_empty() {
        name.ends_with(EXTENSION)
    } else {
        files.extensions.iter().any(|ending| !ending.is_empty() && name.ends_with(ending.as_str()))
    };
    if !named && files.front_controller.as_deref().map(|front| front.trim_start_matches('/')) != Some(script)
    {
        return refuse("it has none of the site's endings for programs");
    }
    Ok(())
}

/// Builds the complete environment: the edge's variables, then the keeper's own, then the site's
/// record's.
pub fn environment(
    from_edge: Vec<(String, String)>,
    root: &Path,
    script: &str,
    site: &BTreeMap<String, String>,
) -> Result<Vec<CString>, Fault> {
    let mut all: BTreeMap<String, Vec<u8>> = BTreeMap::new();
    if from_edge.len() > VARIABLES_MAX {
        return refuse(&format!("{} variables are more than {VARIABLES_MAX}", from_edge.len()));
    }
    for (name, value) in from_edge {
        if !is_variable(&name) {
            return refuse(&format!("'{}' is not for the edge to set", quoted(&name)));
        }
        if value.bytes().any(|b| b == 0) {
            return refuse(&format!("the value of {name} has a NUL byte"));
        }
        if IGNORED.contains(&name.as_str()) {
            continue;
        }
        if let Some(twice) = all.insert(name.clone(), value.into_bytes()) {
            return refuse(&format!("{name} is given twice, first as {} bytes", twice.len()));
        }
    }
    let below = |path: &[u8]| {
        let mut full = root.as_os_str().as_bytes().to_vec();
        while full.last() == Some(&b'/') {
            full.pop();
        }
        full.extend_from_slice(path);
        full
    };
    if let Some(info) = all.get("PATH_INFO").filter(|info| info.starts_with(b"/")) {
        let translated = below(info);
        all.insert("PATH_TRANSLATED".into(), translated);
    }
    all.insert("DOCUMENT_ROOT".into(), root.as_os_str().as_bytes().to_vec());
    all.insert("SCRIPT_FILENAME".into(), below(format!("/{script}").as_bytes()));
    all.insert("PATH".into(), PATH.into());
    for (name, value) in site {
        all.insert(name.clone(), value.clone().into_bytes());
    }
    all.into_iter().map(|(name, value)| variable(&name, &value)).collect()
}

/// Returns `NAME=value` as a program gets it. The operator's variables may have any unambiguous
/// name.
pub fn variable(name: &str, value: &[u8]) -> Result<CString, Fault> {
    if name.is_empty() || name.contains('=') {
        return refuse(&format!("'{}' cannot be the name of a variable", quoted(name)));
    }
    match CString::new([name.as_bytes(), b"=", value].concat()) {
        Ok(text) => Ok(text),
        Err(_) => refuse(&format!("variable {} has a NUL byte", quoted(name))),
    }
}

/// Whether the edge may send it: of the server's names only the useful ones, and all that rules may
/// set.
fn is_variable(name: &str) -> bool {
    let header = name.strip_prefix("HTTP_").is_some_and(|rest| {
        !rest.is_empty() && rest.bytes().all(|b| matches!(b, b'A'..=b'Z' | b'0'..=b'9' | b'_'))
    });
    let is_known = header || VARIABLES.contains(&name) || IGNORED.contains(&name);
    is_known || VariableOwner::of(name) == VariableOwner::Rules
}

fn refuse<T>(why: &str) -> Result<T, Fault> {
    Err(Fault::new(FailureKind::Invalid, fault::ENVIRONMENT, format!("environment refused: {why}")))
}

fn quoted(text: &str) -> String {
    text.chars().take(QUOTED_MAX).flat_map(char::escape_debug).collect()
}

#[cfg(test)]
mod tests;
