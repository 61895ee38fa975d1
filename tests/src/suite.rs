//! The runner: tests of one topic share a node, which is stopped when all tests are through; stopping is a test too.
//!
//! Not here: the node (`world`).

use std::io::Write as _;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::process::ExitCode;
use std::sync::{Arc, OnceLock};

use libtest_mimic::{Arguments, Trial};

use crate::machine;
use crate::world::World;

/// Tests mostly wait for timeouts and processes, so more of them run at once than there are cores.
const THREADS: usize = 6;

/// Tests of one topic.
pub struct Suite {
    pub name: &'static str,
    /// Starts the node they share.
    pub world: fn() -> World,
    /// Without root there are no tenants' uids, and nothing of it can be shown.
    pub needs_root: bool,
    pub tests: &'static [(&'static str, fn(&World))],
}

/// `[("name", name), ...]` of functions.
#[macro_export]
macro_rules! tests {
    ($($test:ident),* $(,)?) => { &[$((stringify!($test), $test)),*] };
}

struct Shared {
    suite: Suite,
    world: OnceLock<Result<World, String>>,
}

impl Shared {
    /// A node that does not start fails every test of its topic, each at once.
    fn world(&self) -> &World {
        let started =
            self.world.get_or_init(|| catch_unwind(self.suite.world).map_err(|panic| text_of(&*panic)));
        started
            .as_ref()
            .unwrap_or_else(|error| panic!("the node of '{}' did not start: {error}", self.suite.name))
    }
}

fn text_of(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("it panicked").to_owned()
}

/// Runs the tests that the command line selects. Takes libtest's arguments.
pub fn run(suites: Vec<Suite>) -> ExitCode {
    let mut arguments = Arguments::from_args();
    arguments.test_threads.get_or_insert(THREADS);
    let shared: Vec<_> =
        suites.into_iter().map(|suite| Arc::new(Shared { suite, world: OnceLock::new() })).collect();
    let trials = shared.iter().flat_map(trials).collect();
    let conclusion = libtest_mimic::run(&arguments, trials);
    let mut stopped = true;
    for shared in shared {
        let name = shared.suite.name;
        let Some(Ok(world)) = Arc::into_inner(shared).and_then(|shared| shared.world.into_inner()) else {
            continue;
        };
        if catch_unwind(AssertUnwindSafe(|| world.stop())).is_err() {
            let _ = writeln!(std::io::stderr(), "the node of '{name}' did not end as it should");
            stopped = false;
        }
    }
    if stopped && !conclusion.has_failed() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn trials(shared: &Arc<Shared>) -> Vec<Trial> {
    let trial = |(name, test): &(&'static str, fn(&World))| {
        let (shared, name, test) = (Arc::clone(shared), format!("{}::{name}", shared.suite.name), *test);
        Trial::test(name.clone(), move || {
            if shared.suite.needs_root && !machine::is_root() {
                skip(&name, "needs root");
                return Ok(());
            }
            let world = shared.world();
            if let Err(panic) = catch_unwind(AssertUnwindSafe(|| test(world))) {
                world.show_logs(&name);
                resume_unwind(panic);
            }
            Ok(())
        })
    };
    shared.suite.tests.iter().map(trial).collect()
}

/// Says that a test did not run. `./dev test` counts these lines.
pub fn skip(name: &str, reason: &str) {
    // Not `println`: what a test prints may be held back, and this must be seen.
    let _ = writeln!(std::io::stderr(), "SKIPPED {name}: {reason}");
}
