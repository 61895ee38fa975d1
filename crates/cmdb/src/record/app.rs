//! An application: what is run, in which surroundings, when it is ready, and how it rests while nobody needs it.
//!
//! Not here: its checks (`check::app`), running it (`keeper::instances`).

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::{Amount, Base, Buffering, Files, Outbound};

/// Most words each of `writable`, `secrets`, `warm_up`, `image_watch`, `after_wake` and `databases`: each is a mount, a file or a request at a start.
pub const APP_LIST_LEN_MAX: usize = 32;

/// Longest release name, in bytes.
pub const RELEASE_LEN_MAX: usize = 128;

/// Longest time of a rest step, in seconds: a year.
pub const IDLE_SECONDS_MAX: u32 = 31_536_000;

/// The port that an application is told to listen on in its sandbox, where all are free.
pub const APP_PORT: u16 = 8080;

/// Most instances an application may have, each on a node of its own.
pub const INSTANCES_MAX: u32 = 16;

/// Longest start an application may be given, in seconds.
pub const START_SECONDS_MAX: u32 = 300;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct App {
    /// Program and arguments. `{socket}` and `{port}` are replaced; `$NAGAYA_SOCKET` or `$PORT` is set too.
    pub command: Vec<String>,
    /// Working directory: beneath the tenant's home if relative.
    pub directory: PathBuf,
    #[serde(default)]
    pub listen: Listen,
    #[serde(default, skip_serializing_if = "Protocol::is_default")]
    pub protocol: Protocol,
    /// FastCGI: the document root, which of its files are scripts for the application, and how the others are served.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub files: Option<Box<Files>>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
    /// Variables whose values are in files that the tenant may read: beneath its home if relative. What is in them is in no
    /// record.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub secrets: BTreeMap<String, PathBuf>,
    /// How long it may take until it listens, seconds. None: the node's default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub start_seconds: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_seconds: Option<u32>,
    /// HTTP: fields behind a request's body that it gets. All others end at the node (RFC 9110 section 6.5.1).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub request_trailers: Vec<String>,
    /// Not for FastCGI, which needs a length.
    #[serde(default, skip_serializing_if = "Buffering::is_default")]
    pub request_buffering: Buffering,
    /// What it sees as `/`, read-only. None: the node's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base: Option<Base>,
    /// Where it may write, besides its own `/tmp`: beneath the tenant's home if relative. Empty: its directory.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub writable: Vec<PathBuf>,
    /// What it must answer before it gets requests. None: that it listens is enough.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ready: Option<Ready>,
    /// Names what is deployed: an image of another release is not used.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub release: Option<String>,
    /// How its memory comes back from an image.
    #[serde(default, skip_serializing_if = "ImageMemory::is_default")]
    pub image_memory: ImageMemory,
    /// Which moment of the application its image is of.
    #[serde(default, skip_serializing_if = "ImageWhen::is_default")]
    pub image_when: ImageWhen,
    /// Files and directories that end its image when they change, also where it writes them itself: beneath its directory if
    /// relative. Of a directory its direct entries.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub image_watch: Vec<PathBuf>,
    /// What it is told once it is back from an image, before any request: paths that nagaya gets, and signals (`SIGHUP`).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub after_wake: Vec<String>,
    /// Paths that nagaya gets by itself before an image is taken, so that what a first request loads is in it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub warm_up: Vec<String>,
    #[serde(default, skip_serializing_if = "Idle::is_default")]
    pub idle: Idle,
    /// Processes of it that are always there: 1 starts it without a request and never lets it rest below reclaimed. None: 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub min: Option<u32>,
    /// How many of it there may be, each on a node of its own. None: 1. A node alone has one, whatever this says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max: Option<u32>,
    /// How far its site's CPU limit may be raised, while it is short of CPU and by rules: `200%`. None: as the node's settings say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_max: Option<Amount>,
    #[serde(default, skip_serializing_if = "Outbound::is_default")]
    pub outbound: Outbound,
    /// Sockets of databases on this node that it reaches.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub databases: Vec<Database>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Listen {
    /// A Unix socket at a path nagaya gives it.
    #[default]
    Socket,
    /// A loopback TCP port nagaya gives it.
    Port,
    /// A Unix socket that nagaya listens on and hands to it as descriptor 3 (`LISTEN_FDS=1`, sd_listen_fds(3)).
    Fd,
}

/// How an application's memory comes back from an image.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ImageMemory {
    /// Mapped in programs that are known to be the same with it (Apache, PHP-FPM, Python, Ruby), and copied in others.
    #[default]
    Auto,
    /// Pages are read from the image's file as they are touched: `madvise` cannot give those back, nor `mremap` make them more.
    Mapped,
    /// All pages are read at each wake, into memory like any other.
    Copied,
}

impl ImageMemory {
    fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

/// Which moment of an application its image is of.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ImageWhen {
    /// Right after its start, before its first visitor.
    #[default]
    Start,
    /// Each time it goes to rest as an image: what is in its memory then survives, secrets and visitors' data too.
    Rest,
}

impl ImageWhen {
    fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

/// Signals an application may be sent after a wake.
pub const AFTER_WAKE_SIGNALS: [&str; 4] = ["SIGHUP", "SIGUSR1", "SIGUSR2", "SIGWINCH"];

/// What is spoken with an application.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Protocol {
    /// HTTP/1.1: the application gets all requests as they are.
    #[default]
    Http,
    /// The application gets requests for scripts, each over a connection of its own; the edge serves the other files.
    FastCgi,
}

impl Protocol {
    fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

/// An answer an application must give, with a status below 500, before it is taken to be ready.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Ready {
    /// Got with `GET`.
    pub path: String,
    /// How long it may take from when it listens, seconds. None: what is left of its start.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub within_seconds: Option<u32>,
}

/// After how many seconds without a request each step down is taken. None: the node's default.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Idle {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quiet: Option<After>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub frozen: Option<After>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reclaimed: Option<After>,
    /// Where there is no image, `cold` counts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<After>,
    /// Of one that has no image: the end of its processes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cold: Option<After>,
}

impl Idle {
    fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged, expecting = "a number of seconds or \"never\"")]
pub enum After {
    Seconds(u32),
    Word(Never),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Never {
    Never,
}

impl After {
    pub const NEVER: Self = Self::Word(Never::Never);

    /// None: never.
    pub fn seconds(self) -> Option<u32> {
        match self {
            Self::Seconds(seconds) => Some(seconds),
            Self::Word(Never::Never) => None,
        }
    }
}

/// A Unix socket of the node that an application finds at a path of its own.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Database {
    /// On the node.
    pub socket: PathBuf,
    /// Inside. None: the same path.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub inside: Option<PathBuf>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_application_reads_and_writes_the_same_json() {
        let text = r#"{"command":["gunicorn","-b","fd://3","site.wsgi"],"directory":"app","listen":"fd","env":{"A":"b"},"secrets":{"KEY":"key.txt"},"base":"/srv/base","writable":["app/media"],"ready":{"path":"/health","within_seconds":5},"release":"2024-1","warm_up":["/"],"idle":{"quiet":1,"frozen":10,"image":"never"},"min":1,"max":1,"cpu_max":"200%","outbound":"host","databases":[{"socket":"/run/mysqld/mysqld.sock"},{"socket":"/run/pg.sock","inside":"/tmp/pg.sock"}]}"#;
        let app: App = serde_json::from_str(text).unwrap();
        assert_eq!(serde_json::to_string(&app).unwrap(), text);
        assert_eq!((app.idle.quiet, app.idle.image), (Some(After::Seconds(1)), Some(After::NEVER)));
        assert_eq!(app.idle.reclaimed, None);
    }

    #[test]
    fn what_it_was_before_is_enough() {
        let text = r#"{"command":["x"],"directory":"a","listen":"socket"}"#;
        let app: App = serde_json::from_str(text).unwrap();
        assert_eq!((&app.outbound, app.min, app.idle), (&Outbound::None, None, Idle::default()));
        assert_eq!(serde_json::to_string(&app).unwrap(), text);
    }

    #[test]
    fn a_fastcgi_application_has_files() {
        let text = r#"{"command":["php-fpm"],"directory":"wp","listen":"socket","protocol":"fastcgi","files":{"root":"wp/html","front_controller":"index.php"}}"#;
        let app: App = serde_json::from_str(text).unwrap();
        assert_eq!(app.protocol, Protocol::FastCgi);
        assert_eq!(serde_json::to_string(&app).unwrap(), text);
    }

    #[test]
    fn a_time_is_seconds_or_never() {
        assert_eq!(After::Seconds(3).seconds(), Some(3));
        assert_eq!(After::NEVER.seconds(), None);
        for bad in [r#"{"quiet":"soon"}"#, r#"{"quiet":-1}"#, r#"{"asleep":1}"#] {
            assert!(serde_json::from_str::<Idle>(bad).is_err(), "{bad}");
        }
    }
}
