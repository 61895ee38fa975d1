//! The directory of images: its contents, the images put aside, the removal of old ones.
//!
//! ```text
//! images/<id>/        one image: `header` and CRIU's files; the header's time of change is its use
//! quarantine/<id>.<n> one that turned out wrong, with a file `reason`
//! refused/<id>        why there is none, and where that was found out
//! work/<n>            under way; removed at the next start
//! incoming/<id>       the archive of an image from another node, as far as it has come
//! key                 signs the headers of this node's images; without it all are taken again
//! ```
//!
//! An image appears by one rename. It is not forced to disk: after a power failure its files may be
//! cut, which the check at its next use sees. Not here: files of one image (`files`), what makes
//! one (`checkpoint`).

use std::collections::HashMap;
use std::fs;
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use data_encoding::HEXLOWER;
use parking_lot::Mutex;
use ring::hmac;
use serde::{Deserialize, Serialize};

use crate::image::clock::unix_now;
use crate::image::error::{ImageError, at};
use crate::image::files;
use crate::image::format::header::{self, ID_LEN, ImageEnvironment, ImageHeader, ImageSubject};
use crate::image::store::marks::{self, FileStamps};
use crate::image::store::space::SpaceBudget;
use crate::image::store::work_dir::CriuWorkDir;
use crate::image::watch::watched::{self, WatchedInputs};
use crate::sandbox::Sandbox;

/// Time for which a failure to take an image is remembered: an open connection may be closed
/// another time.
const REFUSAL_AGE_MAX: Duration = Duration::from_secs(24 * 3600);

/// Number of wrong images before none is taken any more for that time.
const QUARANTINES_BEFORE_REFUSAL: usize = 2;

/// Maximum number of images put aside that are kept for an investigation, the newest.
const QUARANTINED_MAX: usize = 8;

/// Prefix of the names of archives that were put aside: they say nothing about images of this node.
const FOREIGN: &str = "from-another-node-";

/// Maximum number of partial archives, and how long they wait for the rest.
const INCOMING_MAX: usize = 16;
const INCOMING_AGE_MAX: Duration = Duration::from_secs(3600);

/// The file with the key that signs headers, and its length.
const KEY: &str = "key";
const KEY_LEN: usize = 32;

/// Length of a node's name in its images, bytes.
const ORIGIN_LEN: usize = 8;

/// Maximum number of remembered refusals.
const REFUSALS_MAX: usize = 10_000;

/// Maximum length of a refusal's file, bytes.
const REFUSAL_LEN_MAX: u64 = 64 * 1024;

/// Bytes that must stay free on the file system of the images.
const FREE_BYTES_MIN: u64 = 256 << 20;

/// Limits of all images.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ImageLimits {
    /// Bytes of all images together.
    pub bytes_max: u64,
    pub images_max: usize,
    /// An image that was not used for this time is removed. One that was taken this long ago is
    /// replaced.
    pub age_max: Duration,
}

/// An image that was taken this many times `age_max` ago is no longer used, whatever became of its
/// replacement.
const PAST_USE: u32 = 2;

impl ImageLimits {
    fn is_past_use(&self, taken_at: u64) -> bool {
        since(taken_at) > self.age_max.saturating_mul(PAST_USE)
    }
}

/// One line of a list.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ListedImage {
    pub id: String,
    /// `None` if its header cannot be read.
    pub subject: Option<ImageSubject>,
    pub bytes: u64,
    /// Seconds since 1970.
    pub taken_at: u64,
    pub used_at: u64,
    /// Why it was put aside.
    pub quarantined: Option<String>,
}

#[derive(Debug, Serialize, Deserialize)]
struct ImpossibleImage {
    reason: String,
    /// Another environment may give another result.
    environment: ImageEnvironment,
    subject: ImageSubject,
}

#[derive(Debug)]
pub struct ImageStore {
    dir: PathBuf,
    /// Signs headers.
    key: hmac::Key,
    limits: Mutex<ImageLimits>,
    next: AtomicU64,
    /// Images whose contents were compared since the start.
    checked: Mutex<HashMap<String, FileStamps>>,
    /// Number of readers of each image that is being read.
    held: Mutex<HashMap<String, u32>>,
}

/// Keeps an image from being removed.
pub struct ImagePin<'a> {
    store: &'a ImageStore,
    id: String,
}

impl Drop for ImagePin<'_> {
    fn drop(&mut self) {
        let mut held = self.store.held.lock();
        match held.get_mut(&self.id) {
            Some(count) if *count > 1 => *count -= 1,
            _ => drop(held.remove(&self.id)),
        }
    }
}

/// Returns the time since then. Zero for a future time: the clock was set.
fn since(seconds: u64) -> Duration {
    Duration::from_secs(unix_now().saturating_sub(seconds))
}

impl ImageStore {
    pub fn open(dir: &Path, limits: ImageLimits) -> Result<Self, ImageError> {
        make(dir)?;
        for part in ["images", "quarantine", "refused", "work", "incoming"] {
            make(&dir.join(part))?;
        }
        // Left by a keeper that was killed.
        for path in entries(&dir.join("work")) {
            fs::remove_dir_all(&path).map_err(at("remove", &path))?;
        }
        Ok(Self {
            dir: dir.into(),
            key: open_key(&dir.join(KEY)).map_err(at("open", dir.join(KEY)))?,
            limits: Mutex::new(limits),
            next: AtomicU64::new(unix_now()),
            checked: Mutex::default(),
            held: Mutex::default(),
        })
    }

    pub fn dir(&self) -> &Path {
        &self.dir
    }

    pub fn set_limits(&self, limits: ImageLimits) {
        *self.limits.lock() = limits;
    }

    /// Whether another image should replace one that was taken then.
    pub fn is_old(&self, taken_at: u64) -> bool {
        since(taken_at) > self.limits.lock().age_max
    }

    pub fn is_past_use(&self, taken_at: u64) -> bool {
        self.limits.lock().is_past_use(taken_at)
    }

    pub fn path(&self, id: &str) -> PathBuf {
        self.dir.join("images").join(id)
    }

    /// Makes a directory for CRIU in this sandbox to write to.
    pub fn work(&self, sandbox: &Sandbox) -> Result<CriuWorkDir, ImageError> {
        let path = self.dir.join("work").join(self.number().to_string());
        CriuWorkDir::new(path.clone(), sandbox).map_err(at("make", path))
    }

    /// Makes a directory of the keeper's own.
    pub fn closed_work(&self) -> Result<CriuWorkDir, ImageError> {
        let path = self.dir.join("work").join(self.number().to_string());
        CriuWorkDir::closed(path.clone()).map_err(at("make", path))
    }

    /// Returns the path at which the archive of an image is staged.
    pub fn staging(&self, id: &str) -> PathBuf {
        self.dir.join("incoming").join(id)
    }

    /// Puts a wrong archive aside. Only the last of these is kept: another node may send many.
    pub fn quarantine_staged(&self, id: &str, reason: &str) {
        let aside = self.dir.join("quarantine");
        for old in entries(&aside).filter(|path| name(path).starts_with(FOREIGN)) {
            remove(&old);
        }
        let target = aside.join(format!("{FOREIGN}{id}.{}", self.number()));
        let moved = fs::DirBuilder::new()
            .mode(0o700)
            .create(&target)
            .and_then(|()| fs::rename(self.staging(id), target.join("archive")))
            .and_then(|()| write(&target.join("reason"), reason.as_bytes()));
        if let Err(error) = moved {
            tracing::warn!(%error, "an archive that is wrong cannot be kept in {}", target.display());
            remove(&self.staging(id));
        }
    }

    fn number(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    /// Returns how many bytes the next image may have.
    pub fn room(&self) -> Result<SpaceBudget, ImageError> {
        let stat = rustix::fs::statvfs(&self.dir).map_err(|errno| at("look at", &self.dir)(errno.into()))?;
        let free = stat.f_bavail.saturating_mul(stat.f_frsize);
        if free <= FREE_BYTES_MIN {
            let reason = format!("{} has {free} bytes left; {FREE_BYTES_MIN} stay free", self.dir.display());
            return Err(ImageError::NoSpace { reason });
        }
        Ok(SpaceBudget { limit: self.limits.lock().bytes_max, left: free - FREE_BYTES_MIN })
    }

    /// Removes a useless image, without keeping it for an investigation.
    pub fn discard(&self, id: &str) {
        self.checked.lock().remove(id);
        if self.path(id).exists() {
            remove(&self.path(id));
        }
    }

    // === Images ===

    /// Returns `None` if there is no image. The error says why it is wrong.
    pub fn header(&self, id: &str) -> Result<Option<ImageHeader>, String> {
        let path = self.path(id).join(header::NAME);
        let text = match read(&path, header::LEN_MAX) {
            Err(error) if error.kind() == io::ErrorKind::NotFound && !self.path(id).exists() => {
                return Ok(None);
            }
            text => text.map_err(|error| format!("its header: {error}"))?,
        };
        ImageHeader::verify(&text, &self.key).map(Some).map_err(|why| format!("its header {why}"))
    }

    /// Whether the files are unchanged since it was taken. The error describes the problem.
    pub fn check(&self, id: &str, header: &ImageHeader) -> Result<(), String> {
        let dir = self.path(id);
        let marks = marks::marks(&dir, &header.files)?;
        if self.checked.lock().get(id) == Some(&marks) {
            return Ok(());
        }
        marks::compare(&dir, &header.files)?;
        self.checked.lock().insert(id.to_owned(), marks);
        Ok(())
    }

    /// Returns the dependencies of an image that has been checked. The error describes the problem.
    pub fn watched(&self, id: &str, header: &ImageHeader) -> Result<WatchedInputs, String> {
        if !header.files.contains_key(watched::FILE) {
            return Err("it does not say which files it depends on".into());
        }
        let read = files::read(&self.path(id), watched::FILE, watched::LEN_MAX);
        let bytes = read.map_err(|error| format!("{}: {error}", watched::FILE))?;
        let bytes = bytes.ok_or_else(|| format!("{} is too long", watched::FILE))?;
        WatchedInputs::decode(&bytes).map_err(|error| format!("{}: {error}", watched::FILE))
    }

    /// Returns a name of this node that its images carry. It reveals nothing about the key it is
    /// made with.
    pub fn origin(&self) -> String {
        let tag = hmac::sign(&self.key, b"origin");
        HEXLOWER.encode(&tag.as_ref()[..ORIGIN_LEN])
    }

    /// Starts reading the memory of an image from disk, so that it is cached when CRIU needs it.
    /// Returns at once.
    pub fn prefetch(&self, id: &str, header: &ImageHeader) {
        for name in header.files.keys().filter(|name| name.starts_with("pages-")) {
            // Only a hint.
            if let Ok(file) = fs::File::open(self.path(id).join(name)) {
                let _ = rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::WillNeed);
            }
        }
    }

    /// Makes the contents of `work` the image of this id, in place of an older one.
    pub fn publish(&self, id: &str, header: &ImageHeader, work: CriuWorkDir) -> Result<(), ImageError> {
        let path = work.path.join(header::NAME);
        let text = header.sign(&self.key).map_err(|error| at("write", &path)(error.into()))?;
        let file = fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path);
        file.and_then(|mut file| file.write_all(text.as_bytes())).map_err(at("write", &path))?;
        if self.held.lock().contains_key(id) {
            return Err(at("replace", self.path(id))(io::ErrorKind::ResourceBusy.into()));
        }
        let (target, aside) = (self.path(id), self.dir.join("work").join(self.number().to_string()));
        self.checked.lock().remove(id);
        match fs::rename(&target, &aside) {
            Ok(()) => remove(&aside),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(at("replace", &target)(error)),
        }
        fs::rename(&work.path, &target).map_err(at("make", &target))?;
        self.forget_refusal(id);
        // Written by this process just now, and its source read just now.
        if let Ok(marks) = marks::marks(&target, &header.files) {
            self.checked.lock().insert(id.to_owned(), marks);
        }
        Ok(())
    }

    /// Notes that an image was used.
    pub fn touch(&self, id: &str) {
        let path = self.path(id).join(header::NAME);
        let touched = fs::File::open(&path).and_then(|file| file.set_modified(SystemTime::now()));
        if let Err(error) = touched {
            tracing::info!(%error, "when an image was used last is not noted: {}", path.display());
        }
    }

    pub fn hold(&self, id: &str) -> ImagePin<'_> {
        *self.held.lock().entry(id.to_owned()).or_insert(0) += 1;
        ImagePin { store: self, id: id.to_owned() }
    }

    // === Images put aside ===

    pub fn quarantine(&self, id: &str, subject: &ImageSubject, environment: &ImageEnvironment, reason: &str) {
        self.checked.lock().remove(id);
        let target = self.dir.join("quarantine").join(format!("{id}.{}", self.number()));
        // Another thread may have been quicker.
        if let Err(error) = fs::rename(self.path(id), &target) {
            tracing::info!(%error, "there is no image {id} to put aside");
            return;
        }
        if let Err(error) = write(&target.join("reason"), reason.as_bytes()) {
            tracing::warn!(%error, "the reason cannot be kept in {}", target.display());
        }
        let is_its = |path: &PathBuf| name(path).strip_prefix(id).is_some_and(|rest| rest.starts_with('.'));
        let before = entries(&self.dir.join("quarantine")).filter(is_its).count();
        if before >= QUARANTINES_BEFORE_REFUSAL {
            let reason = format!("its last {before} images turned out wrong, the last because {reason}");
            self.refuse(id, subject, environment, &reason);
        }
    }

    pub fn refuse(&self, id: &str, subject: &ImageSubject, environment: &ImageEnvironment, reason: &str) {
        let refusal = ImpossibleImage {
            reason: reason.into(),
            environment: environment.clone(),
            subject: subject.clone(),
        };
        let path = self.dir.join("refused").join(id);
        let written =
            serde_json::to_vec(&refusal).map_err(io::Error::from).and_then(|text| write(&path, &text));
        if let Err(error) = written {
            tracing::warn!(%error, "{} cannot be written; it will be tried again", path.display());
        }
    }

    /// Returns why no image can be taken here and now.
    pub fn refusal(
        &self,
        id: &str,
        subject: &ImageSubject,
        environment: &ImageEnvironment,
    ) -> Option<String> {
        let path = self.dir.join("refused").join(id);
        let age = fs::metadata(&path).ok()?.modified().ok()?.elapsed().unwrap_or_default();
        let refusal: ImpossibleImage = serde_json::from_str(&read(&path, REFUSAL_LEN_MAX).ok()?).ok()?;
        let holds = age < REFUSAL_AGE_MAX
            && refusal.subject == *subject
            && environment.differs(&refusal.environment).is_none();
        holds.then_some(refusal.reason)
    }

    pub fn forget_refusal(&self, id: &str) {
        let path = self.dir.join("refused").join(id);
        if let Err(error) = fs::remove_file(&path)
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::warn!(%error, "{} cannot be removed", path.display());
        }
    }

    // === All of them ===

    pub fn list(&self) -> Vec<ListedImage> {
        let images = entries(&self.dir.join("images")).map(|path| listed(&path, None));
        let aside = entries(&self.dir.join("quarantine")).map(|path| {
            let reason = read(&path.join("reason"), REFUSAL_LEN_MAX);
            listed(&path, Some(reason.unwrap_or_else(|_| "its reason was not kept".into())))
        });
        images.chain(aside).collect()
    }

    pub fn collect(&self, wanted: impl Fn(&ImageSubject) -> bool) {
        let limits = *self.limits.lock();
        let mut all: Vec<ListedImage> =
            entries(&self.dir.join("images")).map(|path| listed(&path, None)).collect();
        all.sort_by_key(|one| std::cmp::Reverse(one.used_at));
        let (mut bytes, mut count) = (0_u64, 0);
        for one in all {
            let is_old = since(one.used_at) > limits.age_max || limits.is_past_use(one.taken_at);
            let is_wanted = one.subject.as_ref().is_some_and(&wanted);
            bytes = bytes.saturating_add(one.bytes);
            count += 1;
            let fits = bytes <= limits.bytes_max && count <= limits.images_max;
            if (is_wanted && !is_old && fits) || self.held.lock().contains_key(&one.id) {
                continue;
            }
            bytes -= one.bytes;
            count -= 1;
            tracing::info!(id = one.id, bytes = one.bytes, "an image goes: {}", why(is_wanted, is_old));
            self.checked.lock().remove(&one.id);
            remove(&self.path(&one.id));
        }
        keep_newest(&self.dir.join("quarantine"), QUARANTINED_MAX, limits.age_max);
        keep_newest(&self.dir.join("incoming"), INCOMING_MAX, INCOMING_AGE_MAX);
        keep_newest(&self.dir.join("refused"), REFUSALS_MAX, REFUSAL_AGE_MAX);
    }
}

fn why(is_wanted: bool, is_old: bool) -> &'static str {
    match (is_wanted, is_old) {
        (false, _) => "its release is not served any more",
        (_, true) => "it was not used for long, or taken too long ago",
        _ => "there are too many; others were used since",
    }
}

fn listed(path: &Path, quarantined: Option<String>) -> ListedImage {
    let header = path.join(header::NAME);
    let used = fs::metadata(&header).or_else(|_| fs::metadata(path));
    let decoded =
        read(&header, header::LEN_MAX).ok().and_then(|text| ImageHeader::read_unverified(&text).ok());
    let bytes =
        |path| entries(path).filter_map(|file| fs::symlink_metadata(file).ok()).map(|stat| stat.len()).sum();
    ListedImage {
        id: name(path).chars().take(ID_LEN).collect(),
        bytes: bytes(path),
        taken_at: decoded.as_ref().map_or(0, |header| header.taken_at),
        subject: decoded.map(|header| header.subject),
        used_at: used.map_or(0, |stat| stat.mtime().try_into().unwrap_or(0)),
        quarantined,
    }
}

/// Keeps only the newest entries.
fn keep_newest(dir: &Path, most: usize, age_max: Duration) {
    let mut all: Vec<(i64, PathBuf)> =
        entries(dir).filter_map(|path| Some((fs::symlink_metadata(&path).ok()?.ctime(), path))).collect();
    all.sort_by_key(|(changed, _)| std::cmp::Reverse(*changed));
    for (index, (changed, path)) in all.into_iter().enumerate() {
        if index >= most || since(changed.try_into().unwrap_or(0)) > age_max {
            remove(&path);
        }
    }
}

// === Files ===

/// Opens the key in this file, which is made if there is none. It never leaves the node.
fn open_key(path: &Path) -> io::Result<hmac::Key> {
    let kept = match fs::File::open(path) {
        Ok(mut file) => {
            let mut bytes = [0; KEY_LEN];
            let is_whole = file.read_exact(&mut bytes).is_ok();
            is_whole.then_some(bytes)
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(error) => return Err(error),
    };
    let bytes = match kept {
        Some(bytes) => bytes,
        // A truncated key has signed nothing that is kept: the file appears by one rename.
        None => make_key(path)?,
    };
    Ok(hmac::Key::new(hmac::HMAC_SHA256, &bytes))
}

fn make_key(path: &Path) -> io::Result<[u8; KEY_LEN]> {
    let mut bytes = [0; KEY_LEN];
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())?;
    let draft = path.with_extension("new");
    write(&draft, &bytes)?;
    fs::File::open(&draft)?.sync_all()?;
    fs::rename(&draft, path)?;
    Ok(bytes)
}

fn make(dir: &Path) -> Result<(), ImageError> {
    let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(dir);
    // An existing one may have been open to others.
    made.and_then(|()| fs::set_permissions(dir, fs::Permissions::from_mode(0o700))).map_err(at("make", dir))
}

fn entries(dir: &Path) -> impl Iterator<Item = PathBuf> + use<> {
    fs::read_dir(dir).into_iter().flatten().filter_map(|entry| Some(entry.ok()?.path()))
}

fn name(path: &Path) -> String {
    path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
}

fn read(path: &Path, len_max: u64) -> io::Result<String> {
    let mut text = String::new();
    fs::File::open(path)?.take(len_max).read_to_string(&mut text)?;
    Ok(text)
}

fn write(path: &Path, text: &[u8]) -> io::Result<()> {
    fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(path)?.write_all(text)
}

fn remove(path: &Path) {
    let removed = match path.is_dir() {
        true => fs::remove_dir_all(path),
        false => fs::remove_file(path),
    };
    if let Err(error) = removed {
        tracing::warn!(%error, "{} cannot be removed", path.display());
    }
}
