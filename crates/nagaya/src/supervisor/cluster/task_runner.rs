//! Does what other nodes ask of this one.
//!
//! Not here: asking (`delegated`), moving a site (`mover`).

use std::rc::Rc;

use nagaya_records::PlacementReason;
use nagaya_records::feed::FetchResult;
use tokio::time::sleep;

use super::delegated::{DelegatedTasks, LOOK_EVERY, shortened};
use super::delegated_task::{DelegatedTask, TaskOutcome};
use super::image_fetcher::ImageFetcher;
use super::load::NodeReport;
use super::mover::SiteMover;
use super::view::ClusterView;

pub struct TaskRunner {
    pub view: Rc<ClusterView>,
    pub delegated: Rc<DelegatedTasks>,
    pub mover: Rc<SiteMover>,
    pub images: Rc<ImageFetcher>,
}

impl TaskRunner {
    /// Does other nodes' tasks, while this node is a member.
    pub async fn run(self: Rc<Self>) {
        loop {
            sleep(LOOK_EVERY).await;
            let wished = self.view.store.presences().into_iter().filter(|told| told.node != self.view.node);
            // Usually there is none.
            let wished = wished.filter(|told| told.json.contains("\"wishes\""));
            let wished = wished.filter_map(|told| serde_json::from_str::<NodeReport>(&told.json).ok());
            let wished =
                wished.flat_map(|load| load.wishes).filter(|wish| wish.at == self.view.node).collect();
            for wish in self.delegated.accept(wished) {
                tokio::task::spawn_local(Rc::clone(&self).grant(wish));
            }
        }
    }

    async fn grant(self: Rc<Self>, wish: DelegatedTask) {
        let DelegatedTask { id, site, to, image_from, .. } = wish;
        let outcome = match image_from {
            Some(from) => match self.images.fetch(&site, &from).await {
                Some(FetchResult::Here { .. }) => TaskOutcome::Brought,
                Some(FetchResult::None) => TaskOutcome::Failed(format!("'{from}' has none")),
                Some(FetchResult::Failed { reason }) => TaskOutcome::Failed(shortened(&reason)),
                None => TaskOutcome::Failed("its edge did not answer".into()),
            },
            None => match self
                .mover
                .relocate_from_here(site.as_str(), to.as_deref(), PlacementReason::Operator)
                .await
            {
                Ok(moved) => TaskOutcome::Moved { node: moved.0, epoch: moved.1 },
                Err(problem) => TaskOutcome::Failed(shortened(&problem.detail)),
            },
        };
        self.delegated.finish(id, outcome);
    }
}
