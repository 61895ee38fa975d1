//! The guest's root file system: an ext4 disk with the essential packages and those of the tests.
//! They are as installed on this machine, with all dependencies.
//!
//! It has copies of installed files instead of fresh packages. So there is no second list of
//! versions and no network. The test programs find the C library to which they were linked. Not
//! here: the mounts over it (`run.sh`).

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::io::Write as _;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, ensure};

use super::job::GuestFitting;
use crate::content;
use crate::workspace;

/// Mount point of the disk with the test programs.
pub const TESTS: &str = "/tests";

/// Free space on a disk that is only read, MiB.
pub const ROOM_NONE: u64 = 16;

/// Raised when the image is made differently from the same packages.
const FORMAT: u32 = 4;

/// Never read in the guest.
const LEFT_OUT: [&str; 5] =
    ["/usr/share/doc/", "/usr/share/man/", "/usr/share/locale/", "/usr/share/info/", "/usr/share/lintian/"];

/// Made at installation, so that no package lists them. Nothing secret is among them.
const MADE: [&str; 8] = [
    "/etc/alternatives",
    "/etc/group",
    "/etc/hosts",
    "/etc/ld.so.cache",
    "/etc/nsswitch.conf",
    "/etc/passwd",
    "/etc/php",
    "/usr/local/sbin",
];

/// Links from the time of two directories (usrmerge), and places that every machine has.
const LINKS: [(&str, &str); 4] =
    [("bin", "usr/bin"), ("lib", "usr/lib"), ("lib64", "usr/lib64"), ("sbin", "usr/sbin")];
const PLACES: [&str; 7] = ["dev", "proc", "root", "run", "sys", "tests", "tmp"];

/// Returns an image with these packages, made again only if one of them has changed.
pub fn image(fitting: &GuestFitting) -> Result<PathBuf> {
    let dir = workspace::cache_dir().join("guest");
    fs::create_dir_all(&dir).with_context(|| format!("creating {}", dir.display()))?;
    let [image, list] = ["ext4", "list"].map(|ending| dir.join(fitting.name).with_extension(ending));
    let closure = InstalledPackages::read()?.closure(fitting.packages)?;
    let mut content: String = closure.iter().map(|(name, version)| format!("{name} {version}\n")).collect();
    content.push_str(&format!("format {FORMAT}\n"));
    if image.is_file() && fs::read_to_string(&list).is_ok_and(|made| made == content) {
        return Ok(image);
    }
    println!("making the guest's root file system of {} packages", closure.len());
    let tree = tempfile::tempdir().context("making a directory")?;
    fill(tree.path(), closure.keys().map(String::as_str))?;
    // Never an image without its list: an interrupted run is repeated.
    let _ = fs::remove_file(&list);
    make_disk(tree.path(), &image, fitting.room)?;
    fs::write(&list, content).with_context(|| format!("writing {}", list.display()))?;
    Ok(image)
}

/// Makes an ext4 file system with the content of `tree`, owners and modes included, and `room` MiB.
pub fn make_disk(tree: &Path, disk: &Path, room: u64) -> Result<()> {
    let output = Command::new("du").args(["--summarize", "--block-size=1M"]).arg(tree).output();
    let output = output.context("running du")?;
    let used: u64 = String::from_utf8_lossy(&output.stdout)
        .split_whitespace()
        .next()
        .and_then(|number| number.parse().ok())
        .with_context(|| format!("the size of {}", tree.display()))?;
    // A file of the wrong size from an earlier run would be used as it is.
    let _ = fs::remove_file(disk);
    // Inodes and journal are on top of it. The tables are written now: otherwise the guest's kernel
    // would do it in the background, beside the tests.
    let size = used + used / 4 + room + 32;
    content::run(
        Command::new("mkfs.ext4")
            .args(["-q", "-F", "-m", "0", "-E", "lazy_itable_init=0,lazy_journal_init=0", "-d"])
            .arg(tree)
            .arg(disk)
            .arg(format!("{size}M")),
    )
}

fn fill<'a>(tree: &Path, packages: impl Iterator<Item = &'a str>) -> Result<()> {
    for place in ["usr/bin", "usr/lib", "usr/lib64", "usr/sbin"].into_iter().chain(PLACES) {
        let path = tree.join(place);
        fs::create_dir_all(&path).with_context(|| format!("creating {}", path.display()))?;
    }
    for (link, to) in LINKS {
        symlink(to, tree.join(link)).with_context(|| format!("linking {link}"))?;
    }
    fs::set_permissions(tree, fs::Permissions::from_mode(0o755)).context("opening the root directory")?;
    let tmp = tree.join("tmp");
    fs::set_permissions(&tmp, fs::Permissions::from_mode(0o1777)).context("opening /tmp")?;
    let mut files = listed(packages)?;
    // Made at installation, too; if Python cannot write it, it would compile again at each start.
    let compiled: Vec<String> = files.iter().map(|path| format!("{path}/__pycache__")).collect();
    files.extend(alternatives()?);
    copy(&files, tree, false)?;
    let made = MADE.into_iter().chain(compiled.iter().map(String::as_str));
    let made: Vec<String> = made.filter(|path| Path::new(path).exists()).map(Into::into).collect();
    copy(&made, tree, true)?;
    choose_alternatives(tree)
}

/// Chooses alternatives. This machine may have chosen a program that the guest lacks, such as a
/// `gawk` beside Debian's own `awk`. The guest then uses one that it has.
fn choose_alternatives(tree: &Path) -> Result<()> {
    let choices = tree.join("etc/alternatives");
    let inside = |path: &Path| tree.join(path.strip_prefix("/").unwrap_or(path));
    for choice in fs::read_dir(&choices).with_context(|| format!("reading {}", choices.display()))?.flatten()
    {
        if fs::read_link(choice.path()).is_ok_and(|chosen| inside(&chosen).exists()) {
            continue;
        }
        let all = Command::new("update-alternatives").arg("--list").arg(choice.file_name()).output();
        // An alternative that follows another choice, as manuals do, has no list of its own.
        let all = all.context("running update-alternatives")?.stdout;
        let all = String::from_utf8_lossy(&all);
        let Some(other) = all.lines().map(Path::new).find(|path| inside(path).exists()) else { continue };
        let link = choice.path();
        fs::remove_file(&link).and_then(|()| symlink(other, &link)).context("choosing an alternative")?;
    }
    Ok(())
}

/// Returns the files of packages that exist here: administrators and images leave documentation
/// out.
fn listed<'a>(packages: impl Iterator<Item = &'a str>) -> Result<Vec<String>> {
    let output = Command::new("dpkg-query").arg("--listfiles").args(packages).output();
    let output = output.context("running dpkg-query")?;
    ensure!(output.status.success(), "dpkg-query: {}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let is_wanted = |path: &&str| {
        path.starts_with('/')
            && *path != "/."
            && !LEFT_OUT.iter().any(|prefix| path.starts_with(prefix))
            && fs::symlink_metadata(path).is_ok()
    };
    let links = LINKS.map(|(link, _)| format!("/{link}"));
    let mut files: Vec<String> = text
        .lines()
        .filter(is_wanted)
        .filter(|path| !links.iter().any(|link| link == path))
        .map(Into::into)
        .collect();
    files.sort_unstable();
    files.dedup();
    Ok(files)
}

/// Returns the links with which Debian chooses between programs for one job, such as
/// `/usr/bin/php-cgi`.
fn alternatives() -> Result<Vec<String>> {
    let mut links = Vec::new();
    for dir in ["/usr/bin", "/usr/sbin"] {
        for entry in fs::read_dir(dir).with_context(|| format!("reading {dir}"))?.flatten() {
            let path = entry.path();
            if fs::read_link(&path).is_ok_and(|to| to.starts_with("/etc/alternatives")) {
                links.push(path.to_string_lossy().into_owned());
            }
        }
    }
    Ok(links)
}

/// Copies these paths of the machine into the tree: each alone, or with all below it.
fn copy(paths: &[String], tree: &Path, whole: bool) -> Result<()> {
    let depth = if whole { "--recursion" } else { "--no-recursion" };
    let mut pack = Command::new("tar")
        .args([
            "--create",
            "--directory=/",
            "--absolute-names",
            depth,
            "--verbatim-files-from",
            "--files-from=-",
        ])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .context("starting tar")?;
    let packed = pack.stdout.take().context("the output of tar")?;
    let unpack = Command::new("tar")
        .args(["--extract", "--keep-directory-symlink", "--strip-components=0", "--directory"])
        .arg(tree)
        .stdin(packed)
        .stderr(Stdio::piped())
        .spawn()
        .context("starting tar")?;
    let mut names = pack.stdin.take().context("the input of tar")?;
    // Names are relative, so that the second tar stays inside the tree.
    let text: String = paths.iter().map(|path| format!("{}\n", path.trim_start_matches('/'))).collect();
    names.write_all(text.as_bytes()).context("naming files to tar")?;
    drop(names);
    let unpacked = unpack.wait_with_output().context("waiting for tar")?;
    let packed = pack.wait().context("waiting for tar")?;
    let said = String::from_utf8_lossy(&unpacked.stderr).into_owned();
    ensure!(packed.success() && unpacked.status.success(), "tar could not copy installed files: {said}");
    Ok(())
}

/// dpkg's data on the installed packages.
struct InstalledPackages {
    packages: HashMap<String, RootPackage>,
    /// Names that a package provides, and its own.
    provided: HashMap<String, String>,
}

struct RootPackage {
    version: String,
    is_essential: bool,
    /// For each dependency the acceptable names.
    depends: Vec<Vec<String>>,
}

impl InstalledPackages {
    fn read() -> Result<Self> {
        let format = "${db:Status-Status}\t${Package}\t${Version}\t${Essential}\t${Provides}\t${Pre-Depends}, ${Depends}\n";
        let output = Command::new("dpkg-query").args(["--show", &format!("--showformat={format}")]).output();
        let output = output.context("running dpkg-query")?;
        ensure!(output.status.success(), "dpkg-query: {}", String::from_utf8_lossy(&output.stderr));
        Ok(Self::parse(&String::from_utf8_lossy(&output.stdout)))
    }

    fn parse(text: &str) -> Self {
        let mut found = Self { packages: HashMap::new(), provided: HashMap::new() };
        for line in text.lines() {
            let fields: Vec<&str> = line.split('\t').collect();
            let ["installed", name, version, essential, provides, depends] = fields[..] else { continue };
            for provided in names(provides).into_iter().flatten() {
                found.provided.insert(provided, name.into());
            }
            let package = RootPackage {
                version: version.into(),
                is_essential: essential == "yes",
                depends: names(depends),
            };
            found.packages.insert(name.into(), package);
        }
        found
    }

    /// Returns the wanted and the essential packages with all dependencies, and their versions.
    fn closure(&self, wanted: &[&str]) -> Result<BTreeMap<String, String>> {
        let essential = self.packages.iter().filter(|(_, package)| package.is_essential);
        let mut open: Vec<String> = essential.map(|(name, _)| name.clone()).collect();
        for name in wanted {
            ensure!(
                self.packages.contains_key(*name),
                "the package {name} is not installed: run 'sudo ./dev setup guest'"
            );
            open.push((*name).into());
        }
        let mut closure = BTreeMap::new();
        while let Some(name) = open.pop() {
            let Some(package) = self.packages.get(&name) else { continue };
            if closure.insert(name, package.version.clone()).is_none() {
                let one_of = |names: &Vec<String>| names.iter().find_map(|name| self.real_name(name));
                open.extend(package.depends.iter().filter_map(one_of));
            }
        }
        Ok(closure)
    }

    /// Returns the installed package that provides this name.
    fn real_name(&self, name: &str) -> Option<String> {
        if self.packages.contains_key(name) { Some(name.into()) } else { self.provided.get(name).cloned() }
    }
}

/// Returns the names of a field such as `a (>= 1) | b, c:any`, without versions and architectures.
fn names(field: &str) -> Vec<Vec<String>> {
    let name = |text: &str| text.split([' ', '(', ':']).find(|word| !word.is_empty()).map(String::from);
    field
        .split(',')
        .map(|either| either.split('|').filter_map(|text| name(text.trim())).collect::<Vec<_>>())
        .filter(|either| !either.is_empty())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packages_come_with_what_they_depend_on() {
        let installed = InstalledPackages::parse(
            "installed\tbase\t1\tyes\t\t, libc6\n\
             installed\tlibc6\t2\t\t\t, \n\
             installed\tphp-cgi\t3\t\t\t, php8-cgi | php7-cgi, ucf (>= 1)\n\
             installed\tphp8-cgi\t4\t\tphp-engine (= 8)\tlibc6 (>= 2.36), missing:any\n\
             installed\tmawk\t5\t\tawk\t, \n\
             installed\tucf\t6\t\t\t, awk\n\
             installed\tapache2\t7\t\t\t, libc6\n\
             config-files\tmissing\t8\t\t\t, \n",
        );
        let closure = installed.closure(&["php-cgi"]).unwrap();
        let found: Vec<String> = closure.iter().map(|(name, version)| format!("{name} {version}")).collect();
        assert_eq!(found, ["base 1", "libc6 2", "mawk 5", "php-cgi 3", "php8-cgi 4", "ucf 6"]);
        let error = installed.closure(&["nginx"]).unwrap_err();
        assert!(error.to_string().contains("nginx"), "{error}");
    }
}
