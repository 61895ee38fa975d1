//! The machine for a job: its kernel, its disks, and the words by which the guest starts the
//! program.
//!
//! Not here: booting it (`boot`), what the root file system has (`root`).

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};

use super::boot::GuestMachine;
use super::job::GuestJob;
use super::{initramfs, kernel, root};
use crate::content;

/// Returns the machine for this job, whose files are in `dir`.
pub fn machine(job: &GuestJob, dir: &Path) -> Result<GuestMachine> {
    let kernel = kernel::obtain(job.kernel.as_deref(), job.fitting.modules)?;
    Ok(GuestMachine {
        initramfs: initramfs::write(&kernel, dir)?,
        kernel: kernel.image,
        memory: job.fitting.memory,
        instruction: job.fitting.instruction,
        root: root::image(job.fitting)?,
        tests: tests_disk(job, dir)?,
    })
}

/// Makes a disk with the program, its other files, and the words with which the guest starts it.
pub fn tests_disk(job: &GuestJob, dir: &Path) -> Result<PathBuf> {
    let beside = dir.join("tests");
    fs::create_dir(&beside).context("making a directory")?;
    let copy = |from: &Path, name: &str| {
        if from.is_dir() {
            return content::copy_tree(from, &beside.join(name));
        }
        fs::copy(from, beside.join(name)).with_context(|| format!("copying {}", from.display())).map(drop)
    };
    copy(&job.program, "program")?;
    for (name, from) in &job.beside {
        copy(from, name)?;
    }
    let mut words = vec!["env".to_string()];
    words.extend(job.environment.iter().cloned());
    words.push(format!("{}/program", root::TESTS));
    words.extend(job.words.iter().cloned());
    ensure!(words.iter().all(|word| !word.contains('\n')), "a word for the program is more than one line");
    fs::write(beside.join("words"), words.join("\n") + "\n").context("writing the program's words")?;
    fs::write(beside.join("run"), job.fitting.script).context("writing the guest's script")?;
    let disk = dir.join("tests.ext4");
    root::make_disk(&beside, &disk, root::ROOM_NONE)?;
    Ok(disk)
}
