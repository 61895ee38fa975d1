//! Logs of applications on disk, for root alone: `TENANT/SITE.log`, and older lines in `SITE.log.1`
//! and so on.
//!
//! A file is rotated between two lines, before it would become too long. Not here: which lines come
//! here (`journal`), and when (`writer`).

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use nagaya_base::date;
use nagaya_records::{SiteName, TenantName};

/// Bytes that must stay free on the file system: the node's records may be there.
pub const FREE_BYTES_MIN: u64 = 256 << 20;

/// Owner of a log. Neither name leads out of a directory: the rules for names ensure that
/// (`nagaya_records::names`).
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct LogOwner {
    pub tenant: TenantName,
    pub site: SiteName,
}

/// Limits of one log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LogBounds {
    /// Size of one file.
    pub bytes_max: u64,
    /// With the one that is written to. 0: nothing is written.
    pub files_max: u32,
}

impl LogBounds {
    /// Returns how many bytes may be written in `meter::RENEWED_AFTER`. It is half of the maximum,
    /// so that a flood does not push out all earlier lines.
    pub fn bytes_per_while(self) -> u64 {
        self.bytes_max.saturating_mul(u64::from(self.files_max.max(1))) / 2
    }
}

#[derive(Debug)]
pub struct LogFiles {
    dir: PathBuf,
    free_bytes_min: u64,
}

impl LogFiles {
    pub fn new(dir: PathBuf, free_bytes_min: u64) -> Self {
        Self { dir, free_bytes_min }
    }

    /// Returns the path of a file. Number 0 is the one that is written to.
    fn path(&self, owner: &LogOwner, number: u32) -> PathBuf {
        let LogOwner { tenant, site } = owner;
        let name = match number {
            0 => format!("{site}.log"),
            number => format!("{site}.log.{number}"),
        };
        self.dir.join(tenant.as_str()).join(name)
    }

    /// Adds whole lines. Returns how many bytes of them were written, and why not all. No line is
    /// written in part.
    pub fn append(&self, owner: &LogOwner, lines: &[u8], bounds: LogBounds) -> (usize, io::Result<()>) {
        let mut written = 0;
        while written < lines.len() {
            match self.append_some(owner, &lines[written..], bounds) {
                Ok(len) => written += len,
                Err(error) => return (written, Err(error)),
            }
        }
        (written, Ok(()))
    }

    /// Adds as many lines as fit into the file. Returns their bytes. 0: the file was rotated.
    fn append_some(&self, owner: &LogOwner, lines: &[u8], bounds: LogBounds) -> io::Result<usize> {
        let mut file = self.open(owner)?;
        self.leave_free()?;
        let len = file.metadata()?.len();
        let fits = match whole_lines(lines, bounds.bytes_max.saturating_sub(len)) {
            // A line that is longer than a whole file may be. Settings do not allow that.
            0 if len == 0 => first_line(lines),
            fits => fits,
        };
        if fits == 0 {
            self.move_on(owner, bounds.files_max)?;
            return Ok(0);
        }
        if let Err(error) = file.write_all(&lines[..fits]) {
            file.set_len(len)?;
            return Err(error);
        }
        Ok(fits)
    }

    fn open(&self, owner: &LogOwner) -> io::Result<File> {
        let path = self.path(owner, 0);
        let open = || OpenOptions::new().append(true).create(true).mode(0o600).open(&path);
        match open() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let above = path.parent().expect("a file in a directory");
                fs::DirBuilder::new().recursive(true).mode(0o700).create(above)?;
                open()
            }
            opened => opened,
        }
    }

    fn leave_free(&self) -> io::Result<()> {
        let stat = rustix::fs::statvfs(&self.dir)?;
        if stat.f_bavail.saturating_mul(stat.f_frsize) >= self.free_bytes_min {
            return Ok(());
        }
        let why = format!("less than {} bytes are left on its disk", self.free_bytes_min);
        Err(io::Error::new(io::ErrorKind::StorageFull, why))
    }

    /// Rotates the files: each becomes one older, and the oldest is removed.
    fn move_on(&self, owner: &LogOwner, files_max: u32) -> io::Result<()> {
        let Some(older) = files_max.checked_sub(1).filter(|older| *older > 0) else {
            return there(fs::remove_file(self.path(owner, 0))).map(drop);
        };
        for number in (0..older).rev() {
            there(fs::rename(self.path(owner, number), self.path(owner, number + 1)))?;
        }
        Ok(())
    }

    /// Returns the last lines, without their dates, of about this many bytes.
    pub fn last(&self, owner: &LogOwner, bytes_max: u64) -> io::Result<Vec<String>> {
        let mut text = Vec::new();
        for number in 0.. {
            let left = bytes_max.saturating_sub(text.len() as u64);
            let Some(mut file) = there(File::open(self.path(owner, number)))? else {
                // A file that was just rotated has no successor yet.
                if number == 0 { continue } else { break }
            };
            let from = file.metadata()?.len().saturating_sub(left);
            file.seek(SeekFrom::Start(from))?;
            let mut part = Vec::new();
            file.take(left).read_to_end(&mut part)?;
            if from > 0 {
                // It may begin inside a line.
                let begin = part.iter().position(|byte| *byte == b'\n').map_or(part.len(), |end| end + 1);
                part.drain(..begin);
            }
            part.append(&mut text);
            text = part;
            if from > 0 {
                break;
            }
        }
        Ok(String::from_utf8_lossy(&text).lines().map(|line| without_date(line).to_owned()).collect())
    }

    /// Removes unwanted logs, and files beyond the maximum number. Files without a log's name stay.
    pub fn collect(&self, files_max: u32, wanted: impl Fn(&LogOwner) -> bool) -> io::Result<()> {
        let Some(tenants) = there(fs::read_dir(&self.dir))? else { return Ok(()) };
        for dir in tenants {
            let dir = dir?;
            let name = dir.file_name();
            let Some(tenant) = name.to_str().and_then(|name| TenantName::new(name).ok()) else { continue };
            if dir.file_type()?.is_dir() {
                collect_tenant(&dir.path(), files_max, |site| {
                    wanted(&LogOwner { tenant: tenant.clone(), site })
                })?;
            }
        }
        Ok(())
    }
}

fn collect_tenant(dir: &Path, files_max: u32, wanted: impl Fn(SiteName) -> bool) -> io::Result<()> {
    let mut is_empty = true;
    for file in fs::read_dir(dir)? {
        let file = file?;
        let of = file.file_name().to_str().and_then(parse);
        match of.map(|(site, number)| number < files_max && wanted(site)) {
            Some(false) => drop(there(fs::remove_file(file.path()))?),
            Some(true) | None => is_empty = false,
        }
    }
    match is_empty.then(|| fs::remove_dir(dir)) {
        // One of its logs may be written to just now.
        Some(Err(error)) if error.kind() != io::ErrorKind::DirectoryNotEmpty => Err(error),
        _ => Ok(()),
    }
}

/// Returns site and number of a file.
fn parse(name: &str) -> Option<(SiteName, u32)> {
    let (site, number) = match name.strip_suffix(".log") {
        Some(site) => (site, 0),
        None => {
            let (rest, number) = name.rsplit_once('.')?;
            (rest.strip_suffix(".log")?, number.parse().ok()?)
        }
    };
    Some((SiteName::new(site).ok()?, number))
}

/// Returns `None` if it is missing.
fn there<T>(found: io::Result<T>) -> io::Result<Option<T>> {
    match found {
        Ok(found) => Ok(Some(found)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Returns the length of the lines that fit into the room.
fn whole_lines(lines: &[u8], room: u64) -> usize {
    match usize::try_from(room) {
        Ok(room) if room < lines.len() => {
            lines[..room].iter().rposition(|byte| *byte == b'\n').map_or(0, |end| end + 1)
        }
        _ => lines.len(),
    }
}

fn first_line(lines: &[u8]) -> usize {
    lines.iter().position(|byte| *byte == b'\n').map_or(lines.len(), |end| end + 1)
}

/// Returns a line as it is in a file.
pub fn dated(when: std::time::SystemTime, line: &str) -> String {
    format!("{} {line}\n", date::utc(when))
}

/// Length of a line in a file, beside its text, bytes.
pub const DATE_LEN: usize = date::UTC_LEN + 2;

fn without_date(line: &str) -> &str {
    match (line.get(..date::UTC_LEN), line.get(date::UTC_LEN..)) {
        (Some(date), Some(rest)) if date.ends_with('Z') => rest.strip_prefix(' ').unwrap_or(line),
        _ => line,
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;
    use std::time::SystemTime;

    use super::*;

    const BOUNDS: LogBounds = LogBounds { bytes_max: 10, files_max: 3 };

    fn owner(tenant: &str, site: &str) -> LogOwner {
        LogOwner { tenant: TenantName::new(tenant).unwrap(), site: SiteName::new(site).unwrap() }
    }

    struct Scene {
        _dir: tempfile::TempDir,
        files: LogFiles,
    }

    impl Scene {
        fn new() -> Self {
            let dir = tempfile::tempdir().unwrap();
            let files = LogFiles::new(dir.path().join("logs"), 0);
            Self { _dir: dir, files }
        }

        fn add(&self, owner: &LogOwner, lines: &str) {
            let (written, result) = self.files.append(owner, lines.as_bytes(), BOUNDS);
            result.unwrap();
            assert_eq!(written, lines.len());
        }

        /// Every file with what is in it.
        fn all(&self) -> Vec<(String, String)> {
            let mut all = Vec::new();
            for tenant in fs::read_dir(&self.files.dir).unwrap().flatten() {
                for file in fs::read_dir(tenant.path()).into_iter().flatten().flatten() {
                    let path = file.path();
                    let name = path.strip_prefix(&self.files.dir).unwrap().display().to_string();
                    all.push((name, fs::read_to_string(path).unwrap()));
                }
            }
            all.sort();
            all
        }
    }

    #[test]
    fn a_file_is_moved_on_between_two_lines_and_the_oldest_goes() {
        let (scene, blog) = (Scene::new(), owner("alice", "blog"));
        scene.add(&blog, "one\ntwo\n");
        scene.add(&blog, "3\n");
        scene.add(&blog, "four\n");
        let file = |name: &str, text: &str| (format!("alice/{name}"), text.to_owned());
        assert_eq!(scene.all(), [file("blog.log", "four\n"), file("blog.log.1", "one\ntwo\n3\n")]);
        // More than all files hold.
        scene.add(&blog, "five\n6\n7\neight\n9\n10\neleven\n");
        assert_eq!(
            scene.all(),
            [
                file("blog.log", "eleven\n"),
                file("blog.log.1", "9\n10\n"),
                file("blog.log.2", "6\n7\neight\n")
            ]
        );
        let one = LogBounds { files_max: 1, ..BOUNDS };
        scene.files.append(&blog, b"twelve\n", one).1.unwrap();
        assert_eq!(scene.all()[0], file("blog.log", "twelve\n"), "without older ones it begins anew");
    }

    #[test]
    fn nobody_else_can_read_a_log() {
        let (scene, blog) = (Scene::new(), owner("alice", "blog"));
        scene.add(&blog, "one\n");
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        let file = scene.files.path(&blog, 0);
        let tenant = file.parent().unwrap();
        assert_eq!([&*file, tenant, tenant.parent().unwrap()].map(mode), [0o600, 0o700, 0o700]);
    }

    #[test]
    fn lines_that_do_not_fit_on_the_disk_leave_no_part() {
        let (scene, blog) = (Scene::new(), owner("alice", "blog"));
        scene.add(&blog, "one\n");
        let full = LogFiles::new(scene.files.dir.clone(), u64::MAX);
        let (written, result) = full.append(&blog, b"two\n", BOUNDS);
        assert_eq!((written, result.unwrap_err().kind()), (0, io::ErrorKind::StorageFull));
        // A directory is in the way of the file.
        let in_the_way = owner("alice", "taken");
        fs::create_dir(scene.files.path(&in_the_way, 0)).unwrap();
        assert!(matches!(scene.files.append(&in_the_way, b"x\n", BOUNDS), (0, Err(_))));
        assert_eq!(scene.files.last(&blog, 100).unwrap(), ["one"]);
    }

    #[test]
    fn the_last_lines_are_read_across_files_without_dates() {
        let (scene, blog) = (Scene::new(), owner("alice", "blog"));
        assert!(scene.files.last(&blog, 100).unwrap().is_empty());
        let wide = LogBounds { bytes_max: 70, files_max: 3 };
        for line in ["one", "two 2", "", "four"] {
            let line = dated(SystemTime::now(), line);
            scene.files.append(&blog, line.as_bytes(), wide).1.unwrap();
        }
        assert_eq!(scene.all().len(), 2);
        assert_eq!(scene.files.last(&blog, 1_000).unwrap(), ["one", "two 2", "", "four"]);
        let two = DATE_LEN as u64 * 2 + 4;
        assert_eq!(scene.files.last(&blog, two).unwrap(), ["", "four"], "whole lines");
        assert_eq!(scene.files.last(&blog, two - 1).unwrap(), ["four"]);
        // While it is moved on.
        scene.files.move_on(&blog, 3).unwrap();
        assert_eq!(scene.files.last(&blog, 1_000).unwrap().len(), 4);
    }

    #[test]
    fn logs_of_nobody_go_and_what_is_none_stays() {
        let scene = Scene::new();
        scene.files.collect(3, |_| true).unwrap();
        for (tenant, site) in [("alice", "blog"), ("alice", "blog.log"), ("bob", "shop")] {
            (0..5).for_each(|_| scene.add(&owner(tenant, site), "a line\n"));
        }
        fs::write(scene.files.dir.join("alice/notes.txt"), "").unwrap();
        fs::write(scene.files.dir.join("a file"), "").unwrap();
        scene.files.collect(3, |_| true).unwrap();
        assert_eq!(scene.all().len(), 3 * 3 + 1);
        scene.files.collect(2, |owner| owner.site.as_str() == "blog.log").unwrap();
        let names: Vec<String> = scene.all().into_iter().map(|(name, _)| name).collect();
        assert_eq!(names, ["alice/blog.log.log", "alice/blog.log.log.1", "alice/notes.txt"]);
        assert!(!scene.files.dir.join("bob").exists() && scene.files.dir.join("a file").exists());
    }
}
