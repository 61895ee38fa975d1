//! Holds one thread's means for the steps of a request, step by step.
//!
//! Not here: the other state of the thread (`server::node`).

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use crate::admission::gate::Gate;
use crate::backends::backend_set::Backends;
use crate::http::clients::limits::ClientLimits;
use crate::http::proxy_headers::ForwardingRules;
use crate::options::ThreadLimits;
use crate::record::recorder::RequestRecorder;
use crate::request::placement::placer::Placer;
use crate::request::router::Router;
use crate::rules::ThreadRules;
use crate::shaping::limits::Shaper;
use crate::spool::Spool;

/// One thread's steps, in the order in which a request takes them.
pub struct Services {
    /// Limits of client networks.
    pub clients: Rc<ClientLimits>,
    pub forwarding: Rc<ForwardingRules>,
    pub limits: Rc<ThreadLimits>,
    pub router: Router,
    pub placer: Placer,
    pub rules: Rc<ThreadRules>,
    pub gate: Gate,
    pub shaper: Shaper,
    /// Bodies that wait.
    pub spool: Arc<Spool>,
    pub backends: Backends,
    /// Where the records of requests go.
    pub recorder: RefCell<Rc<RequestRecorder>>,
}

impl Services {
    pub fn recorder(&self) -> Rc<RequestRecorder> {
        Rc::clone(&self.recorder.borrow())
    }

    pub fn set_recorder(&self, recorder: Rc<RequestRecorder>) {
        *self.recorder.borrow_mut() = recorder;
    }

    pub fn measures(&self) -> bool {
        self.recorder.borrow().measures()
    }
}
