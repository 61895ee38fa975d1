//! Holds one thread's means to answer requests: its caches, its pools and its connections to
//! backends.
//!
//! Not here: the step of a request (`exchange`).

use std::rc::Rc;
use std::sync::Arc;

use nagaya_keeper_api::client::{KeeperCallError, KeeperClient};
use nagaya_records::Site;

use crate::backends::files::FileServer;
use crate::backends::files::root::DocumentRoot;
use crate::backends::instances::InstanceTable;
use crate::backends::programs::ProgramRunner;
use crate::backends::upstream::pool::{
    Connector, UpstreamAddress, UpstreamPool, UpstreamSocket, dial, watch_socket,
};
use crate::cluster::membership::EdgeCluster;
use crate::http::proxy_headers::ForwardingRules;
use crate::http::refusal::Refusal;
use crate::options::ThreadLimits;

/// One thread's backends.
pub struct Backends {
    pub files: FileServer,
    pub programs: ProgramRunner,
    pub upstream: Rc<UpstreamPool>,
    pub instances: Rc<InstanceTable>,
    pub forwarding: Rc<ForwardingRules>,
    pub keeper: Rc<KeeperClient>,
    pub limits: Rc<ThreadLimits>,
    pub cluster: Arc<EdgeCluster>,
}

impl Backends {
    /// Returns the site's document root. The keeper opens it under its tenant's rights.
    pub async fn root(&self, site: &Site) -> Result<DocumentRoot, Refusal> {
        self.files
            // Boxed, because most requests find it open.
            .root(site, async || Box::pin(self.keeper.open_root(&site.name)).await.map_err(RootError::Keeper))
            .await
            .map_err(Refusal::from)
    }
}

enum RootError {
    Keeper(KeeperCallError),
    Io(std::io::Error),
}

impl From<std::io::Error> for RootError {
    fn from(error: std::io::Error) -> Self {
        Self::Io(error)
    }
}

impl From<RootError> for Refusal {
    fn from(error: RootError) -> Self {
        match error {
            RootError::Keeper(KeeperCallError::Gone) => Self::Overloaded("the keeper restarts"),
            RootError::Keeper(KeeperCallError::TimedOut) => Self::Overloaded("the keeper is busy"),
            RootError::Keeper(
                KeeperCallError::Refused { message, .. } | KeeperCallError::Elsewhere { message, .. },
            ) => Self::SiteBroken(message),
            RootError::Io(error) => Self::SiteBroken(error.to_string()),
        }
    }
}

impl Connector for Backends {
    async fn connect(&self, address: &UpstreamAddress) -> Result<UpstreamSocket, Refusal> {
        let unreachable = |error: std::io::Error| Refusal::BackendUnreachable(error.to_string());
        match address {
            UpstreamAddress::Tcp(text) => dial(text).await.map_err(unreachable),
            UpstreamAddress::Unix(server) => {
                let socket = self.keeper.connect_server(server.site()).await.map_err(refuse_connection)?;
                watch_socket(socket).map_err(unreachable)
            }
            UpstreamAddress::Instance(_) => {
                Err(Refusal::SiteBroken("an instance has no connection of its own".into()))
            }
        }
    }
}

/// Returns the refusal if the keeper has made no connection to a server.
fn refuse_connection(error: KeeperCallError) -> Refusal {
    match error {
        KeeperCallError::Gone => Refusal::Overloaded("the keeper restarts"),
        KeeperCallError::TimedOut => Refusal::BackendTimeout,
        // With the code of the page that helps.
        KeeperCallError::Refused { .. } | KeeperCallError::Elsewhere { .. } => {
            Refusal::BackendUnreachable(error.to_string())
        }
    }
}
