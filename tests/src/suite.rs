//! The runner: tests of one topic share a node, which is stopped when all tests are through; stopping is a test too.
//!
//! Not here: the node (`world`).

use std::io::Write as _;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::process::ExitCode;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock};
use std::time::{Duration, Instant};

use libtest_mimic::{Arguments, Completion, Trial};

use crate::machine;
use crate::world::World;

/// Tests mostly wait for timeouts and processes, so more of them run at once than there are cores.
const THREADS: usize = 6;

/// Held for reading by each test that runs, and for writing by one that runs alone.
static PROCESSORS: RwLock<()> = RwLock::new(());

/// How long tests that succeeded took.
static DURATIONS: Mutex<Vec<(Duration, String)>> = Mutex::new(Vec::new());

/// So many of them are told at the end.
const SLOWEST_TOLD: usize = 12;

/// Tests of one topic.
pub struct Suite {
    pub name: &'static str,
    /// Without root there are no tenants' uids, and nothing of it can be shown.
    pub needs_root: bool,
    pub tests: Tests,
}

/// Functions with their names; the macro `tests!` writes it.
type List<F> = &'static [(&'static str, F)];

pub enum Tests {
    /// They share the node that the first function starts.
    Sharing(fn() -> World, List<fn(&World)>),
    /// Each starts the nodes it needs.
    Alone(List<fn()>),
}

/// `[("name", name), ...]` of functions.
#[macro_export]
macro_rules! tests {
    ($($test:ident),* $(,)?) => { &[$((stringify!($test), $test)),*] };
}

/// The node of a suite, started by the first test that needs it.
struct Shared {
    name: &'static str,
    start: fn() -> World,
    world: OnceLock<Result<World, String>>,
}

impl Shared {
    /// A node that does not start fails every test of its topic, each at once.
    fn world(&self) -> &World {
        let started = self.world.get_or_init(|| catch_unwind(self.start).map_err(|panic| text_of(&*panic)));
        started.as_ref().unwrap_or_else(|error| panic!("the node of '{}' did not start: {error}", self.name))
    }
}

fn text_of(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("it panicked").to_owned()
}

/// Runs the tests that the command line selects. Takes libtest's arguments. No other test runs beside one whose name begins with
/// one of `saturating`: it takes all processors that it gets.
pub fn run(suites: Vec<Suite>, saturating: &'static [&'static str]) -> ExitCode {
    let mut arguments = Arguments::from_args();
    arguments.test_threads.get_or_insert(THREADS);
    let (mut trials, mut nodes) = (Trials { saturating, ..Trials::default() }, Vec::new());
    for suite in suites {
        match suite.tests {
            Tests::Alone(tests) => {
                tests.iter().for_each(|(name, test)| trials.add(&suite, name, *test));
            }
            Tests::Sharing(start, tests) => {
                let node = Arc::new(Shared { name: suite.name, start, world: OnceLock::new() });
                for (name, test) in tests {
                    let (node, test) = (Arc::clone(&node), *test);
                    trials.add(&suite, name, move || in_shared(&node, test));
                }
                nodes.push(node);
            }
        }
    }
    let conclusion = libtest_mimic::run(&arguments, trials.in_order());
    tell_slowest();
    let mut stopped = true;
    for node in nodes {
        let name = node.name;
        let Some(Ok(world)) = Arc::into_inner(node).and_then(|node| node.world.into_inner()) else {
            continue;
        };
        if catch_unwind(AssertUnwindSafe(|| world.stop())).is_err() {
            let _ = writeln!(std::io::stderr(), "the node of '{name}' did not end as it should");
            stopped = false;
        }
    }
    if stopped && !conclusion.has_failed() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn in_shared(node: &Shared, test: fn(&World)) {
    let world = node.world();
    if let Err(panic) = catch_unwind(AssertUnwindSafe(|| test(world))) {
        if !panic.is::<Skipped>() {
            world.show_logs(node.name);
        }
        resume_unwind(panic);
    }
}

/// What is run.
#[derive(Default)]
struct Trials {
    saturating: &'static [&'static str],
    beside: Vec<Trial>,
    alone: Vec<Trial>,
}

impl Trials {
    fn add(&mut self, suite: &Suite, name: &str, test: impl FnOnce() + Send + 'static) {
        let name = format!("{}::{name}", suite.name);
        let is_saturating = self.saturating.iter().any(|beginning| name.starts_with(beginning));
        let list = if is_saturating { &mut self.alone } else { &mut self.beside };
        list.push(trial(name, suite.needs_root, is_saturating, test));
    }

    /// Those that run alone come last: while one of them waits for its turn, no other begins.
    fn in_order(self) -> Vec<Trial> {
        self.beside.into_iter().chain(self.alone).collect()
    }
}

fn trial(name: String, needs_root: bool, is_saturating: bool, test: impl FnOnce() + Send + 'static) -> Trial {
    Trial::ignorable_test(name.clone(), move || {
        if needs_root && !machine::is_root() {
            return Ok(Completion::ignored_with("needs root"));
        }
        match catch_unwind(AssertUnwindSafe(|| run_within(name, is_saturating, test))) {
            Ok(()) => Ok(Completion::Completed),
            Err(panic) => match panic.downcast::<Skipped>() {
                Ok(skipped) => Ok(Completion::ignored_with(skipped.0)),
                Err(panic) => Err(text_of(&*panic).into()),
            },
        }
    })
}

fn run_within(name: String, is_saturating: bool, test: impl FnOnce()) {
    // A test that panicked leaves nothing behind that the lock guards.
    let _alone = is_saturating.then(|| PROCESSORS.write().unwrap_or_else(PoisonError::into_inner));
    let _beside = (!is_saturating).then(|| PROCESSORS.read().unwrap_or_else(PoisonError::into_inner));
    let begun = Instant::now();
    test();
    DURATIONS.lock().unwrap_or_else(PoisonError::into_inner).push((begun.elapsed(), name));
}

/// Where the suite's time goes.
fn tell_slowest() {
    let mut all = DURATIONS.lock().unwrap_or_else(PoisonError::into_inner);
    all.sort_unstable_by(|one, other| other.cmp(one));
    let slowest =
        all.iter().take(SLOWEST_TOLD).map(|(time, name)| format!("{name} {:.1} s", time.as_secs_f64()));
    let _ = writeln!(std::io::stderr(), "the slowest tests: {}", slowest.collect::<Vec<_>>().join(", "));
}

/// Why a test ended before it had shown anything.
struct Skipped(&'static str);

/// Ends the test because this machine lacks something. It is counted and named, and fails nothing.
pub fn skip(reason: &'static str) -> ! {
    resume_unwind(Box::new(Skipped(reason)))
}
