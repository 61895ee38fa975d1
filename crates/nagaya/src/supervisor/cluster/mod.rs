//! This node as one of several. It takes part in a cluster, keeps its lease, and finds sites
//! another node.
//!
//! All of it runs on a thread of its own, so that nothing else in the supervisor can delay it.
//! [`ClusterCommands`] carries out the commands of operators and the requests of the edge. While
//! the node is a member, `member_tasks` runs one task for each job. Each task reads the cluster
//! through `view`.
//!
//! - `lease_renewer` renews the lease by the rules of `lease_manager`
//! - `relocator` places sites on nodes that `node_chooser` chooses
//! - `takeover_terms` says how long others may still serve a site
//! - `mover` moves sites without an error
//! - `replicas` has a site run on several nodes
//! - `image_fetcher` brings images here ahead
//! - `load_publisher` reports the load of this node
//! - `delegated` asks other nodes for work, and `task_runner` does theirs
//! - `tombstones` clears removed sites
//! - `member_keys` and `record_signer` follow the keys of members
//! - `ticket_keys` follows the keys of tickets
//! - `app_load` measures load for planners
//! - `events` keeps recent events
//! - `store_health` says whether the store can be trusted
//! - `report` answers queries
//!
//! Not here: the records and their store (`nagaya_records`), decisions (`nagaya_placement`),
//! forwarding (`nagaya_edge`).

mod app_load;
mod avoided_nodes;
mod clock;
mod codes;
mod commands;
mod context;
mod delegated;
mod delegated_task;
mod events;
mod image_fetcher;
mod image_inventory;
mod known_node;
mod lease_manager;
mod lease_renewer;
mod lease_state;
pub mod load;
mod load_publisher;
mod member;
mod member_keys;
mod member_listing;
mod member_tasks;
mod mover;
mod node_chooser;
mod node_cpu_limit;
mod node_watcher;
mod orders;
mod pki;
mod placement_counter;
mod placement_counts;
mod record_signer;
mod records;
mod relocator;
mod replicas;
mod report;
mod store_health;
mod store_keys;
mod takeover_terms;
mod task_runner;
mod ticket_keys;
mod tombstones;
mod view;
mod wanted_images;

use std::io;
use std::rc::Rc;

use tokio::sync::mpsc;
use tokio::task::LocalSet;

pub use clock::{now, unix_ms};
pub use codes::NOT_JOINED;
pub use context::ClusterContext;
pub use member::{ClusterMember, MemberError, StoreAccess, edge_options};
pub use orders::{
    ClusterHandle, ClusterOrder, MemberLoad, PlacementRequest, RebalanceStep, channel, not_configured,
};
pub use pki::hold as hold_certificate;
pub use records::NodeRecords;

use self::commands::ClusterCommands;

/// Starts the cluster's thread. `member` is set if this node is in a cluster already.
pub fn start(
    context: ClusterContext,
    member: Option<ClusterMember>,
    mut orders: mpsc::Receiver<ClusterOrder>,
) -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    std::thread::Builder::new().name("cluster".into()).spawn(move || {
        LocalSet::new().block_on(&runtime, async move {
            let desk = Rc::new(ClusterCommands::new(context));
            if let Some(member) = member {
                desk.resume(member);
            }
            while let Some(order) = orders.recv().await {
                tokio::task::spawn_local(Rc::clone(&desk).carry_out(order));
            }
        });
    })?;
    Ok(())
}
