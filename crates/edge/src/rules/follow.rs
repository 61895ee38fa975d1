//! What one thread does for its rules beside requests: sees changed files, tells the keeper of changed cells, and asks it
//! about them.
//!
//! Not here: the files' watch itself (`watch`), what is known of cells (`cells`).

use std::rc::Rc;

use nagaya_cmdb::cell::CellChange;
use nagaya_keeper::client::ClientError;
use tokio::sync::mpsc;
use tokio::time::sleep;

use super::watch::{LOOK_EVERY, Watch};
use super::{CODE_CELLS, Rules};
use crate::node::Node;

/// Runs as long as the thread does. One thread of the process `speaks` for all.
pub async fn follow(node: Rc<Node>, speaks: bool) {
    let rules = Rc::clone(&node.rules);
    let Some(to_keeper) = rules.to_keeper.take() else { return };
    let files = watch_files(&rules, speaks);
    let changes = tell_keeper(&node, to_keeper);
    let cells = async {
        if speaks {
            learn_cells(&node).await;
        }
    };
    tokio::join!(files, changes, cells);
}

async fn watch_files(rules: &Rules, speaks: bool) {
    let mut watch = Watch::new(speaks);
    let begin = |watch: &mut Watch| {
        watch.set_files(rules.shared.rules.paths());
        // What changed before it was watched tells nobody.
        rules.shared.rules.refresh();
        rules.events.replace(watch.events());
    };
    begin(&mut watch);
    loop {
        tokio::select! {
            // A file that came later than its name is read by whoever sees it first; the others find it done.
            is_event = watch.changed() => {
                if is_event {
                    rules.shared.told.forget();
                }
                rules.shared.rules.refresh();
                rules.events.replace(watch.events());
            }
            () = rules.other_files.notified() => begin(&mut watch),
        }
    }
}

async fn tell_keeper(node: &Node, mut changes: mpsc::Receiver<Vec<CellChange>>) {
    while let Some(changes) = changes.recv().await {
        change_cells(node, changes).await;
    }
}

/// Tells the keeper of changes; if it does not take them, the log is told.
pub async fn change_cells(node: &Node, changes: Vec<CellChange>) {
    let Err(error) = node.keeper().change_cells(changes).await else { return };
    let what = format!("cells: {error}");
    if node.shared.told.first(&what) {
        tracing::warn!(code = %CODE_CELLS, "named cells are not as rules want them: {error}");
    }
}

/// Keeps what is known of named cells at most a second old, for as long as rules ask.
async fn learn_cells(node: &Node) {
    let named = &node.shared.named;
    loop {
        sleep(LOOK_EVERY).await;
        if !named.take_asked() {
            continue;
        }
        let changes = named.changes();
        let learnt = match node.keeper().cells().await {
            Ok(json) => named.learn(&json, changes).map_err(|error| error.to_string()),
            // What was known stays; requests find out themselves whether the keeper is there.
            Err(ClientError::Gone) => Ok(()),
            Err(error) => Err(error.to_string()),
        };
        if let Err(error) = learnt
            && node.shared.told.first(&error)
        {
            tracing::warn!(code = %CODE_CELLS, "rules do not see named cells: {error}");
        }
    }
}
