//! Starting an application anew because its tenant has touched a file, `tmp/restart.txt` in its directory, as Passenger has it.
//!
//! The file is looked at once a second while the application runs, and before one that rests is needed again. It is among the files
//! that an image depends on, too. Not here: what a new start is (`lifecycle`), what an operator says (`acts`).

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use nagaya_cmdb::TenantName;
use nagaya_cmdb::instance::Tier;
use tokio::task::spawn_local;
use tokio::time::sleep;

use super::housing::Housing;
use super::lifecycle::Event;
use super::{Instance, Instances};
use crate::engine::Engine;
use crate::image::PathState;
use crate::tenant_path::PathOwner;

/// The file, in the application's directory.
const FILE: &str = "tmp/restart.txt";

/// How often it is looked at.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// The file of one run, as it was when that began.
#[derive(Debug)]
pub struct RestartFile {
    owner: PathOwner,
    path: PathBuf,
    state: PathState,
}

/// Where it is for an application in this directory. `None`: that is not the tenant's, so that others could put it there.
pub fn path_of(home: Option<&Path>, directory: &Path) -> Option<PathBuf> {
    home.filter(|home| directory.starts_with(home)).map(|_| directory.join(FILE))
}

impl RestartFile {
    /// Blocks.
    pub fn new(owner: PathOwner, path: PathBuf) -> Self {
        let state = PathState::of(&owner, &path);
        Self { owner, path, state }
    }

    /// Whether somebody has touched it since. Blocks.
    fn is_touched(&self) -> bool {
        let now = PathState::of(&self.owner, &self.path);
        // One that was removed asks for nothing.
        matches!(now, PathState::Is(_)) && now != self.state
    }
}

impl Housing {
    /// Blocks.
    pub fn restart_file(&self) -> Option<RestartFile> {
        self.restart_path().map(|path| RestartFile::new(self.owner(), path))
    }
}

impl Instances {
    /// Starts those anew whose file is touched while they run, for ever. Each tenant's files are looked at by themselves, because its file
    /// system may hang, and not again before that look has ended.
    pub async fn watch_restarts(&self, engine: &Rc<Engine>) {
        let looking: Rc<RefCell<HashSet<TenantName>>> = Rc::default();
        loop {
            sleep(LOOK_INTERVAL).await;
            let mut running: HashMap<TenantName, Vec<Rc<Instance>>> = HashMap::new();
            for instance in self.sites.borrow().values().filter(|instance| instance.is_watched()) {
                let tenant = instance.site().tenant.clone();
                if !looking.borrow().contains(&tenant) {
                    running.entry(tenant).or_default().push(Rc::clone(instance));
                }
            }
            for (tenant, instances) in running {
                looking.borrow_mut().insert(tenant.clone());
                let (engine, looking) = (Rc::clone(engine), Rc::clone(&looking));
                spawn_local(async move {
                    engine.instances.look_for_restarts(&engine, &tenant, instances).await;
                    looking.borrow_mut().remove(&tenant);
                });
            }
        }
    }

    /// Starts this one anew if its file was touched while it rested.
    pub(super) async fn restart_if_touched(&self, engine: &Rc<Engine>, instance: &Rc<Instance>) {
        if instance.body.borrow().is_some() && !instance.is_awake() {
            let tenant = instance.site().tenant.clone();
            self.look_for_restarts(engine, &tenant, vec![Rc::clone(instance)]).await;
        }
    }

    async fn look_for_restarts(
        &self,
        engine: &Rc<Engine>,
        tenant: &TenantName,
        instances: Vec<Rc<Instance>>,
    ) {
        let file = |instance: &Rc<Instance>| {
            let body = instance.body.borrow().clone()?;
            Some((Rc::clone(instance), instance.life.borrow().run(), body.restart_file.clone()?))
        };
        let found: Vec<_> = instances.iter().filter_map(file).collect();
        if found.is_empty() {
            return;
        }
        let files: Vec<Arc<RestartFile>> = found.iter().map(|(_, _, file)| Arc::clone(file)).collect();
        let look = move || Ok(files.iter().map(|file| file.is_touched()).collect::<Vec<_>>());
        // Should no worker be free, the next look does it.
        let Ok(touched) = engine.on_worker_for(tenant, look).await else { return };
        for ((instance, run, file), is_touched) in found.into_iter().zip(touched) {
            if is_touched && instance.life.borrow().run() == run {
                let path = file.path.display();
                tracing::info!(site = %instance.site().name, "{path} was touched: it is started anew");
                self.tell(engine, &instance, Event::Restart);
            }
        }
    }
}

impl Instance {
    /// Its file is looked at while it runs: one that rests is looked at when it is needed.
    fn is_watched(&self) -> bool {
        let life = self.life.borrow();
        life.tier() >= Tier::Quiet && life.doing().is_none()
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn only_a_file_in_the_tenants_home_restarts() {
        let path = |home: Option<&str>, directory: &str| path_of(home.map(Path::new), Path::new(directory));
        assert_eq!(path(Some("/home/t"), "/home/t/app"), Some("/home/t/app/tmp/restart.txt".into()));
        assert_eq!(path(Some("/home/t"), "/usr/share/redmine"), None);
        assert_eq!(path(None, "/"), None);
    }

    #[test]
    fn a_touch_restarts_and_a_removal_does_not() {
        let home = tempfile::tempdir().unwrap();
        fs::create_dir(home.path().join("tmp")).unwrap();
        let file = || RestartFile::new(PathOwner::new(Some(home.path()), None), home.path().join(FILE));
        let before = file();
        assert!(!before.is_touched());
        fs::write(home.path().join(FILE), "").unwrap();
        assert!(before.is_touched());
        let now = file();
        assert!(!now.is_touched());
        fs::remove_file(home.path().join(FILE)).unwrap();
        assert!(!now.is_touched());
    }
}
