//! Tells the other nodes once a second how busy this one is; they know by it that it is there.

use std::rc::Rc;
use std::time::Duration;

use serde_json::json;

use super::app_load::AppLoadSampler;
use super::delegated::DelegatedTasks;
use super::image_fetcher::ImageFetcher;
use super::load::{self, CpuMeter, NodeReport};
use super::member_keys::MemberKeys;
use super::view::ClusterView;

/// Interval at which a node reports its load, and time without a report after which it counts as
/// gone.
const PRESENT_EVERY: Duration = Duration::from_secs(1);
pub const PRESENT_FOR: Duration = Duration::from_secs(5);

pub struct LoadPublisher {
    pub view: Rc<ClusterView>,
    pub keys: Rc<MemberKeys>,
    pub app_load: Rc<AppLoadSampler>,
    pub images: Rc<ImageFetcher>,
    pub delegated: Rc<DelegatedTasks>,
}

impl LoadPublisher {
    /// Publishes for as long as this node is a member.
    pub async fn run(self) {
        let mut meter = CpuMeter::new();
        loop {
            let mut load = self.measure(&mut meter);
            let mut again = std::pin::pin!(tokio::time::sleep(PRESENT_EVERY));
            loop {
                self.delegated.add_to(&mut load);
                if let Err(error) =
                    self.view.store.present(&self.view.node, json!(load).to_string(), PRESENT_FOR)
                {
                    tracing::warn!(code = %error.code(), "{error}");
                }
                tokio::select! {
                    () = &mut again => break,
                    () = self.delegated.changed() => {}
                }
            }
        }
    }

    fn measure(&self, meter: &mut CpuMeter) -> NodeReport {
        let (memory_bytes, memory_available) = load::memory();
        NodeReport {
            cpu_used: meter.cpu_used(),
            memory_bytes,
            memory_available,
            authority: self.view.borrow_member().credentials.serial,
            believes: self.keys.believed_serial(),
            serves: self.view.lease().is_valid(),
            heat: self.app_load.heat(),
            wakes: self.app_load.wakes(),
            images: Some(self.images.inventory()),
            shared: self.view.context.node.balance.shared.snapshot(),
            ..NodeReport::default()
        }
    }
}
