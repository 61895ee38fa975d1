//! Handles the start of a CGI program: it is requested, and the keeper has not answered yet.
//!
//! The program may run already when its client leaves. So the keeper's answer is awaited in any
//! case. The program then goes on like one whose client leaves later. Not here: the time limit
//! for that (`patience`), the run itself (`super`).

use std::future::poll_fn;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;

use nagaya_keeper_api::client::{CgiProcess, KeeperCallError, KeeperClient};
use nagaya_records::Site;
use nagaya_records::cell::RequestUsage;

use crate::backends::programs::after::BackgroundJobs;
use crate::backends::programs::cgi::{CgiRun, CgiTree, ProgramLabel};
use crate::backends::programs::patience::{ProgramAlarm, ProgramTimeouts};
use crate::backends::programs::script::CgiRunningGuard;
use crate::http::message::RequestBody;
use crate::metrics::EdgeMetrics;
use crate::record::execution::CellExecution;

type CgiStartFuture = Pin<Box<dyn Future<Output = Result<CgiProcess, KeeperCallError>>>>;

/// A program that is being started.
pub struct StartingCgi {
    /// `None` once the result is known.
    coming: Option<CgiStartFuture>,
    whose: Option<ProgramLabel>,
    patience: ProgramTimeouts,
    /// It gets a body. The rest of it does not arrive if its request is given up.
    takes_body: bool,
    execution: Rc<CellExecution>,
    after: Rc<BackgroundJobs>,
    metrics: Arc<EdgeMetrics>,
}

impl StartingCgi {
    /// `whose` names the program, with its file below the document root.
    pub fn begin(
        keeper: &Rc<KeeperClient>,
        site: &Arc<Site>,
        (whose, env): (ProgramLabel, Vec<(String, String)>),
        (patience, takes_body): (ProgramTimeouts, bool),
        (execution, after, metrics): (&Rc<CellExecution>, &Rc<BackgroundJobs>, &Arc<EdgeMetrics>),
    ) -> Self {
        let (keeper, site, script) = (Rc::clone(keeper), Arc::clone(site), whose.script.clone());
        let confinement = Arc::clone(execution.confinement());
        let coming: CgiStartFuture =
            Box::pin(async move { keeper.spawn_cgi(&site.name, &script, env, &confinement).await });
        Self {
            coming: Some(coming),
            whose: Some(whose),
            patience,
            takes_body,
            execution: Rc::clone(execution),
            after: Rc::clone(after),
            metrics: Arc::clone(metrics),
        }
    }

    /// Waits for the keeper's answer. The caller owns the program from then on.
    pub async fn finish(mut self) -> Result<(CgiProcess, ProgramLabel), KeeperCallError> {
        let started = poll_fn(|cx| match &mut self.coming {
            Some(coming) => coming.as_mut().poll(cx),
            None => std::task::Poll::Ready(Err(KeeperCallError::Gone)),
        })
        .await;
        self.coming = None;
        let whose = self.whose.take().ok_or(KeeperCallError::Gone)?;
        Ok((started?, whose))
    }
}

impl Drop for StartingCgi {
    fn drop(&mut self) {
        let Some((coming, whose)) = self.coming.take().zip(self.whose.take()) else { return };
        // It would wait for more input than will come, so its start is taken back.
        if self.takes_body {
            return;
        }
        let linger = ProgramAlarm::new(self.patience, None).linger();
        let (due, after, metrics) =
            (self.execution.begin(), Rc::clone(&self.after), Arc::clone(&self.metrics));
        self.after.run(async move {
            let Ok(started) = coming.await else { return due.report(RequestUsage::default()) };
            let tree = CgiTree::new(whose, started.guard, due, after, CgiRunningGuard::begin(&metrics));
            if let Ok(run) = CgiRun::new(started.stdin, started.stdout, tree, RequestBody::empty()) {
                run.linger(linger).await;
            }
        });
    }
}
