//! An application: its command, its environment, when it is ready, and how it rests while idle.
//!
//! Not here: its checks (`check::app`), running it (`keeper::instances`).

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::{AppMachine, BaseRecord, BodyBuffering, FileRoot, OutboundRules, WrittenAmount};

/// Most entries each of `writable`, `secrets`, `warm_up`, `image_watch`, `after_wake` and
/// `databases`. Each is a mount, a file or a request at a start.
pub const APP_LIST_LEN_MAX: usize = 32;

/// Longest query to a database, and longest name of a user or a database, in bytes.
pub const QUESTION_LEN_MAX: usize = 1024;
pub const DATABASE_NAME_LEN_MAX: usize = 64;

/// Longest release name, in bytes.
pub const RELEASE_LEN_MAX: usize = 128;

/// Longest time of a rest step, in seconds: a year.
pub const IDLE_SECONDS_MAX: u32 = 31_536_000;

/// The port given to an application for listening in its sandbox, where all are free.
pub const APP_PORT: u16 = 8080;

/// Most instances of an application, each on its own node.
pub const INSTANCES_MAX: u32 = 16;

/// Longest start time of an application, in seconds.
pub const START_SECONDS_MAX: u32 = 300;

/// Default and largest time for which an application that computes is kept from rest, seconds.
pub const APP_LINGER_SECONDS: u32 = 600;
pub const APP_LINGER_SECONDS_MAX: u32 = 86_400;

/// Default and largest time from `SIGTERM` to `SIGKILL`, seconds.
pub const STOP_SECONDS: u32 = 2;
pub const STOP_SECONDS_MAX: u32 = 300;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct App {
    /// Program and arguments. `{socket}` and `{port}` are replaced; `$NAGAYA_SOCKET` or `$PORT` is
    /// set, too.
    pub command: Vec<String>,
    /// Working directory: below the tenant's home if relative.
    pub directory: PathBuf,
    #[serde(default)]
    pub listen: AppListen,
    #[serde(default, skip_serializing_if = "AppProtocol::is_default")]
    pub protocol: AppProtocol,
    /// FastCGI: the document root, which of its files are scripts for the application, and how the
    /// others are served.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub files: Option<Box<FileRoot>>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
    /// Variables whose values are in files that the tenant may read: below its home if relative.
    /// Their contents are in no record.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub secrets: BTreeMap<String, PathBuf>,
    /// Longest time until it listens, seconds. `None` means the node's default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub start_seconds: Option<u32>,
    /// Longest time to end after `SIGTERM`, seconds; then the rest of it is killed. `None` means
    /// `STOP_SECONDS`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stop_seconds: Option<u32>,
    /// Longest time that it may compute after its last request before it must rest, seconds. `None`
    /// means `APP_LINGER_SECONDS`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub linger_seconds: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_seconds: Option<u32>,
    /// HTTP: trailer fields of a request that it gets. All others end at the node (RFC 9110 section
    /// 6.5.1).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub request_trailers: Vec<String>,
    /// Not for FastCGI, which needs a length.
    #[serde(default, skip_serializing_if = "BodyBuffering::is_default")]
    pub request_buffering: BodyBuffering,
    /// The read-only root directory that it sees. `None` means the node's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base: Option<BaseRecord>,
    /// Its own kernel: it runs in a virtual machine. `None`: it runs on the node's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub machine: Option<AppMachine>,
    /// Where it may write, in addition to its own `/tmp`: below the tenant's home if relative. If
    /// empty, its directory.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub writable: Vec<PathBuf>,
    /// The reply that it must give before it gets requests. `None` means that listening is enough.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ready: Option<ReadyCheck>,
    /// Name of the deployed release: an image of another release is not used.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub release: Option<String>,
    /// How its memory comes back from an image.
    #[serde(default, skip_serializing_if = "ImageMemory::is_default")]
    pub image_memory: ImageMemory,
    /// The moment at which its image is taken.
    #[serde(default, skip_serializing_if = "ImageWhen::is_default")]
    pub image_when: ImageWhen,
    /// Files and directories that end its image when they change, even by its own writes. They are
    /// below its directory if relative. For a directory, its direct entries count.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub image_watch: Vec<PathBuf>,
    /// Actions once it is back from an image, before any request: paths that nagaya gets, and
    /// signals (`SIGHUP`).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub after_wake: Vec<String>,
    /// Paths that nagaya gets before an image is taken, so that the image includes whatever a first
    /// request loads.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub warm_up: Vec<String>,
    #[serde(default, skip_serializing_if = "IdleSteps::is_default")]
    pub idle: IdleSteps,
    /// Processes of it that always exist: 1 starts it without a request and never lets it rest
    /// below reclaimed. `None` means 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub min: Option<u32>,
    /// Most instances of it, each on its own node. `None` means 1. A node alone has one, whatever
    /// this says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max: Option<u32>,
    /// Highest value to which its site's CPU limit may be raised, while it is short of CPU and by
    /// rules: `200%`. `None` means the node's settings.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_max: Option<WrittenAmount>,
    #[serde(default, skip_serializing_if = "OutboundRules::is_default")]
    pub outbound: OutboundRules,
    /// Sockets of databases on this node that it reaches.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub databases: Vec<AppDatabase>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum AppListen {
    /// A Unix socket at a path that nagaya gives it.
    #[default]
    Socket,
    /// A loopback TCP port that nagaya gives it.
    Port,
    /// A Unix socket on which nagaya listens, passed to it as descriptor 3 (`LISTEN_FDS=1`,
    /// sd_listen_fds(3)).
    Fd,
}

/// How an application's memory comes back from an image.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ImageMemory {
    /// Mapped in programs that are known to behave the same with it (Apache, PHP-FPM, Python,
    /// Ruby), and copied in others.
    #[default]
    Auto,
    /// Pages are read from the image's file when touched. `madvise` cannot give them back, and
    /// `mremap` cannot add more.
    Mapped,
    /// All pages are read at each wake, into normal memory.
    Copied,
}

impl ImageMemory {
    fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

/// The moment at which an application's image is taken.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ImageWhen {
    /// Right after its start, before its first visitor.
    #[default]
    Start,
    /// Each time it goes to rest as an image. Its memory then survives, including secrets and
    /// visitors' data.
    Rest,
}

impl ImageWhen {
    fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

/// Signals that an application may get after a wake.
pub const AFTER_WAKE_SIGNALS: [&str; 4] = ["SIGHUP", "SIGUSR1", "SIGUSR2", "SIGWINCH"];

/// Protocol of an application.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum AppProtocol {
    /// HTTP/1.1: the application gets all requests as they are.
    #[default]
    Http,
    /// The application gets requests for scripts, each over its own connection; the edge serves the
    /// other files.
    FastCgi,
}

impl AppProtocol {
    fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

/// A response, with a status below 500, that an application must give before it counts as ready.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReadyCheck {
    /// Requested with `GET`.
    pub path: String,
    /// Longest time from when it listens, seconds. `None` means the rest of its start time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub within_seconds: Option<u32>,
}

/// Seconds without a request after which each step down is taken. `None` means the node's default.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct IdleSteps {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quiet: Option<AfterWake>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub frozen: Option<AfterWake>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reclaimed: Option<AfterWake>,
    /// If there is no image, `cold` counts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<AfterWake>,
    /// For an application without an image: the end of its processes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cold: Option<AfterWake>,
}

impl IdleSteps {
    fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged, expecting = "a number of seconds or \"never\"")]
pub enum AfterWake {
    Seconds(u32),
    Word(NeverRest),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum NeverRest {
    Never,
}

impl AfterWake {
    pub const NEVER: Self = Self::Word(NeverRest::Never);

    /// Returns the seconds; `None` if never.
    pub fn seconds(self) -> Option<u32> {
        match self {
            Self::Seconds(seconds) => Some(seconds),
            Self::Word(NeverRest::Never) => None,
        }
    }
}

/// A Unix socket of the node that an application finds at its own path.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AppDatabase {
    /// Path on the node.
    pub socket: PathBuf,
    /// Path inside. `None` means the same path.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub inside: Option<PathBuf>,
    /// A query to it. An image ends when the reply changes. `None` means that rows end no image.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tag: Option<DatabaseTag>,
}

/// A query to a database whose reply is the tag of the data that an application has read there.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DatabaseTag {
    pub kind: DatabaseKind,
    /// User name; the database identifies the connection by the tenant's uid. `None` means the
    /// tenant's name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// The selected database. `None` selects none, where the kind allows that. Redis: its number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub database: Option<String>,
    /// An SQL statement, or a command of Redis.
    pub ask: String,
}

/// Protocol of a database.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DatabaseKind {
    /// MySQL and MariaDB.
    Mysql,
    Postgresql,
    /// Redis and Valkey.
    Redis,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_application_reads_and_writes_the_same_json() {
        let text = r#"{"command":["gunicorn","-b","fd://3","site.wsgi"],"directory":"app","listen":"fd","env":{"A":"b"},"secrets":{"KEY":"key.txt"},"base":"/srv/base","writable":["app/media"],"ready":{"path":"/health","within_seconds":5},"release":"2024-1","warm_up":["/"],"idle":{"quiet":1,"frozen":10,"image":"never"},"min":1,"max":1,"cpu_max":"200%","outbound":"host","databases":[{"socket":"/run/mysqld/mysqld.sock"},{"socket":"/run/pg.sock","inside":"/tmp/pg.sock"}]}"#;
        let app: App = serde_json::from_str(text).unwrap();
        assert_eq!(serde_json::to_string(&app).unwrap(), text);
        assert_eq!((app.idle.quiet, app.idle.image), (Some(AfterWake::Seconds(1)), Some(AfterWake::NEVER)));
        assert_eq!(app.idle.reclaimed, None);
    }

    #[test]
    fn app_record_without_newer_fields_is_enough() {
        let text = r#"{"command":["x"],"directory":"a","listen":"socket"}"#;
        let app: App = serde_json::from_str(text).unwrap();
        assert_eq!((&app.outbound, app.min, app.idle), (&OutboundRules::None, None, IdleSteps::default()));
        assert_eq!(serde_json::to_string(&app).unwrap(), text);
    }

    #[test]
    fn a_fastcgi_application_has_files() {
        let text = r#"{"command":["php-fpm"],"directory":"wp","listen":"socket","protocol":"fastcgi","files":{"root":"wp/html","front_controller":"index.php"}}"#;
        let app: App = serde_json::from_str(text).unwrap();
        assert_eq!(app.protocol, AppProtocol::FastCgi);
        assert_eq!(serde_json::to_string(&app).unwrap(), text);
    }

    #[test]
    fn a_time_is_seconds_or_never() {
        assert_eq!(AfterWake::Seconds(3).seconds(), Some(3));
        assert_eq!(AfterWake::NEVER.seconds(), None);
        for bad in [r#"{"quiet":"soon"}"#, r#"{"quiet":-1}"#, r#"{"asleep":1}"#] {
            assert!(serde_json::from_str::<IdleSteps>(bad).is_err(), "{bad}");
        }
    }
}
