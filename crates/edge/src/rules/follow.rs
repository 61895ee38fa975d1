//! Does one thread's work for its rules beside requests. It reloads changed files, reports
//! changed cells to the keeper, and asks it about them.
//!
//! Not here: watching the files (`watch`), the cache of cells (`cells`).

use std::rc::Rc;

use nagaya_keeper_api::client::KeeperCallError;
use nagaya_records::cell::CellChange;
use tokio::sync::mpsc;
use tokio::time::sleep;

use crate::rules::watch::{LOOK_EVERY, RuleWatch};
use crate::rules::{CODE_CELLS, ThreadRules};

/// Runs as long as the thread does. One thread of the process `speaks` for all.
pub async fn follow(rules: Rc<ThreadRules>, speaks: bool) {
    let Some(to_keeper) = rules.to_keeper.take() else { return };
    let files = watch_files(&rules, speaks);
    let changes = tell_keeper(&rules, to_keeper);
    let cells = async {
        if speaks {
            learn_cells(&rules).await;
        }
    };
    tokio::join!(files, changes, cells);
}

async fn watch_files(rules: &ThreadRules, speaks: bool) {
    let mut watch = RuleWatch::new(speaks);
    let begin = |watch: &mut RuleWatch| {
        watch.set_files(rules.shared.set.paths());
        // Changes before the watch began caused no event.
        rules.shared.set.refresh();
        rules.events.replace(watch.events());
    };
    begin(&mut watch);
    loop {
        tokio::select! {
            // A file that appeared later than its name is read by the first thread that sees it.
            // The others find it done.
            is_event = watch.changed() => {
                if is_event {
                    rules.shared.told.forget();
                }
                rules.shared.set.refresh();
                rules.events.replace(watch.events());
            }
            () = rules.other_files.notified() => begin(&mut watch),
        }
    }
}

async fn tell_keeper(rules: &ThreadRules, mut changes: mpsc::Receiver<Vec<CellChange>>) {
    while let Some(changes) = changes.recv().await {
        change_cells(rules, changes).await;
    }
}

/// Sends changes to the keeper. If it does not accept them, that is logged.
pub async fn change_cells(rules: &ThreadRules, changes: Vec<CellChange>) {
    let Err(error) = rules.keeper.change_cells(changes).await else { return };
    let what = format!("cells: {error}");
    if rules.shared.told.first(&what) {
        tracing::warn!(code = %CODE_CELLS, "named cells could not be set as rules require: {error}");
    }
}

/// Keeps the cache of named cells at most a second old while rules ask.
async fn learn_cells(rules: &ThreadRules) {
    let named = &rules.shared.named;
    loop {
        sleep(LOOK_EVERY).await;
        if !named.take_asked() {
            continue;
        }
        let changes = named.changes();
        let learnt = match rules.keeper.cells().await {
            Ok(json) => named.learn(&json, changes).map_err(|error| error.to_string()),
            // The cache stays. Requests find out themselves whether the keeper is there.
            Err(KeeperCallError::Gone) => Ok(()),
            Err(error) => Err(error.to_string()),
        };
        if let Err(error) = learnt
            && rules.shared.told.first(&error)
        {
            tracing::warn!(code = %CODE_CELLS, "rules do not see named cells: {error}");
        }
    }
}
