//! Instances: each site's application, woken when a request needs it, at rest when none does.
//!
//! The instance's lifecycle (`decide::lifecycle`) gets every event and returns the actions.
//! `run::driver` does them on the keeper's one thread, with tasks for long ones. Each instance has
//! a number of its own and counts its runs. So the id of a run names its instance, too.
//!
//! One wake, in the order of reading: `use_instance`, `decide::lifecycle`, `run::driver`,
//! `run::start`, `run::app_launch`. Not here: the connection of an edge (`connection`), HTTP
//! (`edge`).

mod admin;
mod decide;
mod images;
mod limits;
mod lookup;
mod placed;
mod records;
pub(crate) mod run;
mod state;
mod use_instance;

pub use crate::netlink::sock_diag::is_there as unix_diag;
pub use admin::acts::do_act;
pub use admin::exec::exec;
pub use admin::load::{busy, load};
pub use admin::show::{figures, list, status};
pub use images::collection::{collect, collect_logs, settle_logs};
pub use images::keeping::{await_images, keep_images};
pub use images::transfer::{fetch_image, image_fetched, offer_image, send_image};
pub use limits::boost_ref::{BoostRef, begin_boost};
pub use limits::entering::{EnterOutcome, enter_cell};
pub use limits::request_cells::RequestCellRef;
pub use placed::{follow_authority, release_all};
pub use records::{follow_options, follow_records};
pub use run::clock::keep_time;
pub use run::pressure::watch_pressure;
pub use run::restarts::{look_at_site, watch_restarts};
pub use state::shared::NodeInstances;
pub use use_instance::{ReadyInstance, RunRef, connect, note_answered, use_site};
