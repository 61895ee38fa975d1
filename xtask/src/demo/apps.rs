//! The demo's applications that rest while idle: a journal (Django), Redmine (Rails) and WordPress
//! with MariaDB. WordPress runs once on Apache and once on php-fpm. Each has its own tenant.
//!
//! Not here: how they are made (`content`), the sites of files or programs (the parent module).

use std::fs;
use std::io::Write as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, anyhow, ensure};
use serde_json::json;

use crate::content::mariadb::MariaDb;
use crate::content::wordpress::{self, WordpressServer};
use crate::content::{self, ContentApp, LOGIN, MissingPackage, django, redmine};
use crate::guest::kernel::own_release;
use crate::server::nagaya::NagayaNode;

const QEMU: &str = "/usr/bin/qemu-system-x86_64";

/// MariaDB runs under a uid that no tenant has.
const MARIADB_UID: u32 = 310_009;

/// Machine of the journal, which has a kernel of its own. Where QEMU has to translate, it starts
/// slowly.
const MACHINE_MEMORY: &str = "192M";
const MACHINE_START_SECONDS: u32 = 240;

/// Idle times of the demo: short enough to watch.
pub const IDLE: &str =
    "[instances]\nfrozen_after = \"5s\"\nreclaimed_after = \"20s\"\nimage_after = \"1m\"\n";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AppKind {
    Django,
    Redmine,
    WordPress,
}

/// The place of an application in the demo.
#[derive(Debug)]
pub struct AppPlace {
    pub kind: AppKind,
    /// Name of its site, and of the host `SITE.localhost`.
    pub site: &'static str,
    tenant: &'static str,
    uid: u32,
    pub what: &'static str,
}

/// In the order in which they are shown.
static PLACES: [AppPlace; 4] = [
    AppPlace {
        kind: AppKind::Django,
        site: "journal",
        tenant: "authors",
        uid: 310_003,
        what: "Django with its admin, on gunicorn, in a virtual machine",
    },
    AppPlace {
        kind: AppKind::Redmine,
        site: "redmine",
        tenant: "planners",
        uid: 310_004,
        what: "Redmine: Rails, on puma",
    },
    AppPlace {
        kind: AppKind::WordPress,
        site: "wordpress",
        tenant: "bloggers",
        uid: 310_005,
        what: "WordPress: PHP in Apache, with MariaDB",
    },
    AppPlace {
        kind: AppKind::WordPress,
        site: "weblog",
        tenant: "columnists",
        uid: 310_006,
        what: "WordPress on php-fpm, with MariaDB",
    },
];

impl AppPlace {
    pub fn host(&self) -> String {
        format!("{}.localhost", self.site)
    }

    fn home(&self, dir: &Path) -> PathBuf {
        dir.join("home").join(self.tenant)
    }

    /// Makes the application, or returns which of Debian's files it would need.
    fn make(&self, dir: &Path, create: impl FnOnce(&Path) -> Result<ContentApp>) -> Result<Made> {
        super::report_progress(self.what);
        let home = self.home(dir);
        fs::create_dir_all(&home).with_context(|| format!("creating {}", home.display()))?;
        fs::set_permissions(&home, fs::Permissions::from_mode(0o700)).context("closing a tenant's home")?;
        match create(&home.join(self.site)) {
            Ok(app) => {
                content::give(&home, self.uid)?;
                Ok(Ok(app))
            }
            Err(error) if error.downcast_ref::<MissingPackage>().is_some() => Ok(Err(format!("{error:#}"))),
            Err(error) => Err(error.context(format!("making {}", self.site))),
        }
    }
}

/// Gives an application a kernel of its own.
fn in_a_machine(mut app: ContentApp) -> Result<ContentApp> {
    content::need(&[QEMU])?;
    own_release()?;
    app.backend["machine"] = json!({"kernel": "node", "memory": MACHINE_MEMORY});
    app.backend["start_seconds"] = MACHINE_START_SECONDS.into();
    Ok(app)
}

/// An application, or why there is none.
type Made = Result<ContentApp, String>;

/// The applications that could be made. Their database server ends with this value.
pub struct DemoApps {
    mariadb: Option<MariaDb>,
    made: Vec<(&'static AppPlace, Made)>,
}

impl DemoApps {
    /// Makes all of them. Redmine takes longest; `meanwhile` runs at the same time.
    pub fn create(dir: &Path, meanwhile: impl FnOnce() -> Result<()>) -> Result<Self> {
        let [journal, redmine, wordpress, weblog] = &PLACES;
        let mut mariadb = None;
        let made = std::thread::scope(|scope| {
            let slow = scope.spawn(|| redmine.make(dir, |tree| redmine::create(tree, redmine.uid)));
            let mut word = |place: &'static AppPlace, server: WordpressServer| {
                place.make(dir, |tree| {
                    let database = match &mut mariadb {
                        Some(database) => database,
                        None => mariadb.insert(MariaDb::start(&dir.join("mariadb"), MARIADB_UID)?),
                    };
                    wordpress::create(tree, place.uid, &database.database(place.site)?, server)
                })
            };
            let (apache, fpm) =
                (word(wordpress, WordpressServer::Apache)?, word(weblog, WordpressServer::PhpFpm)?);
            let diary = journal.make(dir, |tree| in_a_machine(django::create(tree, journal.uid)?))?;
            meanwhile()?;
            let tracker = slow.join().map_err(|_| anyhow!("making Redmine panicked"))??;
            Ok::<_, anyhow::Error>(vec![
                (journal, diary),
                (redmine, tracker),
                (wordpress, apache),
                (weblog, fpm),
            ])
        })?;
        Ok(Self { mariadb, made })
    }

    /// Returns those that exist.
    pub fn hosted(&self) -> impl Iterator<Item = (&'static AppPlace, &ContentApp)> {
        self.made.iter().filter_map(|(place, made)| made.as_ref().ok().map(|app| (*place, app)))
    }

    /// Returns the missing ones, with the reasons.
    pub fn missing(&self) -> impl Iterator<Item = (&'static AppPlace, &str)> {
        self.made.iter().filter_map(|(place, made)| made.as_ref().err().map(|why| (*place, why.as_str())))
    }

    /// Adds their tenants and sites to a node.
    pub fn import(&self, node: &NagayaNode, dir: &Path) -> Result<()> {
        let (path, mut writer) = node.records("apps.jsonl")?;
        for (place, app) in self.hosted() {
            let (name, uid) = (place.tenant, place.uid);
            let tenant = json!({"tenant": {"name": name, "uid": uid, "gid": uid, "home": place.home(dir)}});
            for record in [vec![tenant], app.records(place.site, name, &place.host())].concat() {
                writeln!(writer, "{record}").context("writing records")?;
            }
        }
        writer.flush().context("writing records")?;
        drop(writer);
        node.import(&path).map(drop)
    }

    /// Returns rows of the front page's table.
    pub fn rows(&self, port: u16) -> String {
        let there = self.hosted().map(|(place, app)| {
            let (site, host, what) = (place.site, place.host(), place.what);
            format!(
                "  <tr><td><a href=\"http://{host}:{port}/\">{site}</a><td>{what}; \
                 <a href=\"http://{host}:{port}{}\">log in</a> as <code>{}</code>, <code>{}</code>\n",
                app.login, LOGIN.name, LOGIN.password
            )
        });
        let absent = self.missing().map(|(place, _)| format!("  <tr><td>{}<td>not installed\n", place.site));
        there.chain(absent).collect()
    }

    /// Returns lines of the terminal's welcome.
    pub fn lines(&self, port: u16) -> String {
        // As wide as those of the other sites.
        let width = 29 + port.to_string().len();
        let there = self.hosted().map(|(place, _)| {
            let address = format!("http://{}:{port}/", place.host());
            format!("  {address:width$} {}\n", place.what)
        });
        let absent = self.missing().map(|(place, why)| format!("  (no {}: {why})\n", place.site));
        there.chain(absent).collect()
    }

    /// Ends the database server. Fails if it left something behind.
    pub fn stop(mut self) -> Result<()> {
        let left = self.mariadb.as_mut().map(MariaDb::stop).unwrap_or_default();
        ensure!(left.is_empty(), "processes outlived MariaDB:\n  {}", left.join("\n  "));
        Ok(())
    }
}
