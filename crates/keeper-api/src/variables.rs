//! Owners of the names of a program's variables. The list is the same for the edge, which makes
//! them, and the keeper, which does not trust it.
//!
//! Not here: their values, and which of them a program gets (`cgi`, and the edge's
//! `programs::environment`).

/// Maximum length of a name that is checked, in bytes. A longer one is nobody's.
const NAME_LEN_MAX: usize = 128;

/// The component that may set a variable of a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VariableOwner {
    /// The server describes the request with it: the program's path, the client and its request
    /// (RFC 3875 section 4.1).
    Server,
    /// It decides which code is loaded and run, and where. Only the keeper and the site's record
    /// set it.
    Loader,
    /// The operator's rules may set it.
    Rules,
    /// No variable has such a name.
    Nobody,
}

/// Beginnings of names that belong to the server, and whole names.
const SERVER_PREFIXES: &[&str] = &[
    "CONTENT_",
    "CONTEXT_",
    "DOCUMENT_",
    "FCGI_",
    "GATEWAY_",
    "HTTP_",
    "NAGAYA_",
    "ORIG_",
    "PATH_",
    "REDIRECT_",
    "REMOTE_",
    "REQUEST_",
    "SCRIPT_",
    "SERVER_",
    "SSL_",
];
const SERVER: &[&str] = &["HTTPS", "QUERY_STRING", "TRACEPARENT", "UNIQUE_ID"];

/// The names among them that identify the user: a rule that checks a login sets them.
const LOGIN: &[&str] = &["REMOTE_IDENT", "REMOTE_USER"];

/// The same for names that loaders, interpreters and libraries read before a program's first line.
const LOADER_PREFIXES: &[&str] = &[
    "BASH",
    "BUNDLE_",
    "DYLD_",
    "GEM_",
    "GIT_CONFIG",
    "GIT_SSH",
    "GLIBC_",
    "JAVA_",
    "LD_",
    "LUA_",
    "MALLOC_",
    "NODE_",
    "OPENSSL_",
    "PERL",
    "PHP",
    "PYTHON",
    "RUBY",
];
const LOADER: &[&str] = &[
    "ALL_PROXY",
    "AWKPATH",
    "CDPATH",
    "CLASSPATH",
    "EDITOR",
    "ENV",
    "FTP_PROXY",
    "GCONV_PATH",
    "GETCONF_DIR",
    "GIT_ASKPASS",
    "GIT_EDITOR",
    "GIT_EXEC_PATH",
    "GIT_EXTERNAL_DIFF",
    "GIT_PAGER",
    "GIT_PROXY_COMMAND",
    "GLOBIGNORE",
    "HOME",
    "HOSTALIASES",
    "HTTPS_PROXY",
    "HTTP_PROXY",
    "IFS",
    "JDK_JAVA_OPTIONS",
    "LOCALDOMAIN",
    "LOCPATH",
    "LOGNAME",
    "NLSPATH",
    "NO_PROXY",
    "OLDPWD",
    "PAGER",
    "PATH",
    "PROMPT_COMMAND",
    "PS4",
    "PWD",
    "RES_OPTIONS",
    "SHELL",
    "SHELLOPTS",
    "TCLLIBPATH",
    "TMPDIR",
    "TZDIR",
    "USER",
    "_JAVA_OPTIONS",
];

impl VariableOwner {
    /// Returns the owner of the variable `name`. Case does not matter: some names are read in lower
    /// case, too.
    pub fn of(name: &str) -> Self {
        let begins = name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_');
        if !begins
            || name.len() > NAME_LEN_MAX
            || !name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
        {
            return Self::Nobody;
        }
        let name = name.to_ascii_uppercase();
        let is_in = |names: &[&str]| names.contains(&name.as_str());
        let begins_with_any = |prefixes: &[&str]| prefixes.iter().any(|prefix| name.starts_with(prefix));
        if is_in(LOADER) || begins_with_any(LOADER_PREFIXES) {
            Self::Loader
        } else if is_in(LOGIN) {
            Self::Rules
        } else if is_in(SERVER) || begins_with_any(SERVER_PREFIXES) {
            Self::Server
        } else {
            Self::Rules
        }
    }
}

#[cfg(test)]
mod tests {
    use super::VariableOwner::{self, Loader, Nobody, Rules, Server};

    #[test]
    fn each_name_has_one_owner() {
        let table: &[(VariableOwner, &[&str])] = &[
            (
                Server,
                &[
                    "SCRIPT_FILENAME",
                    "SCRIPT_NAME",
                    "DOCUMENT_ROOT",
                    "PATH_TRANSLATED",
                    "PATH_INFO",
                    "GATEWAY_INTERFACE",
                    "REMOTE_ADDR",
                    "REMOTE_PORT",
                    "SERVER_NAME",
                    "HTTPS",
                    "CONTENT_LENGTH",
                    "REQUEST_URI",
                    "QUERY_STRING",
                    "REDIRECT_STATUS",
                    "HTTP_ACCEPT",
                    "http_accept",
                    "SSL_CLIENT_VERIFY",
                    "UNIQUE_ID",
                    "FCGI_ROLE",
                    "ORIG_SCRIPT_FILENAME",
                ],
            ),
            (
                Loader,
                &[
                    "LD_PRELOAD",
                    "PHP_VALUE",
                    "PHP_ADMIN_VALUE",
                    "PHPRC",
                    "PHP_INI_SCAN_DIR",
                    "PERL5LIB",
                    "PERL5OPT",
                    "PYTHONPATH",
                    "RUBYOPT",
                    "NODE_OPTIONS",
                    "BASH_ENV",
                    "ENV",
                    "IFS",
                    "PATH",
                    "HTTP_PROXY",
                    "http_proxy",
                    "https_proxy",
                    "HOME",
                    "TMPDIR",
                    "JAVA_TOOL_OPTIONS",
                ],
            ),
            (
                Rules,
                &["FOO", "APP_ENV", "foo", "_x1", "REMOTE_USER", "REMOTE_IDENT", "AUTH_TYPE", "TZ", "HTTPD"],
            ),
            (Nobody, &["", "=", "A=B", "A\0", "1A", "A-B", "\u{c4}", "A B"]),
        ];
        for (owner, names) in table {
            for name in *names {
                assert_eq!(VariableOwner::of(name), *owner, "{name}");
            }
        }
        assert_eq!(VariableOwner::of(&"A".repeat(super::NAME_LEN_MAX + 1)), Nobody);
    }
}
