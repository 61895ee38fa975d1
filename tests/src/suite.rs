//! The runner: tests of one topic share a node, which is stopped when all tests are through; stopping is a test too.
//!
//! Not here: the node (`world`).

use std::io::Write as _;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::process::ExitCode;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use libtest_mimic::{Arguments, Completion, Trial};

use crate::machine;
use crate::world::World;

/// Tests mostly wait for timeouts and processes, so more of them run at once than there are cores.
const AT_ONCE: usize = 6;

/// Tests that may run at this moment.
static RUNNING: Places = Places::new(AT_ONCE);

/// Those of them that are of a cluster on loopback, and those that are of a lab. Either is some nodes and an etcd, which mostly wait,
/// but on a machine that runs many of them they are slower than a fence lasts.
static CLUSTERS: Places = Places::new(2);
static LABS: Places = Places::new(1);

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

/// How tests get on with each other, by the beginnings of their names.
pub struct Order {
    /// No other test runs beside one of these: it takes all processors that it gets.
    pub saturating: &'static [&'static str],
    /// One of each of these runs at once. They begin first, so that nothing is left to wait for them at the end.
    pub clusters: &'static [&'static str],
    pub labs: &'static [&'static str],
}

/// Runs the tests that the command line selects. Takes libtest's arguments.
pub fn run(suites: Vec<Suite>, order: &Order) -> ExitCode {
    let mut arguments = Arguments::from_args();
    if let Some(threads) = arguments.test_threads {
        RUNNING.set(threads);
    }
    let mut trials = Trials::default();
    let mut nodes = Vec::new();
    for suite in suites {
        match suite.tests {
            Tests::Alone(tests) => {
                tests.iter().for_each(|(name, test)| trials.add(order, &suite, name, *test));
            }
            Tests::Sharing(start, tests) => {
                let node = Arc::new(Shared { name: suite.name, start, world: OnceLock::new() });
                for (name, test) in tests {
                    let node = Arc::clone(&node);
                    let test = *test;
                    trials.add(order, &suite, name, move || in_shared(&node, test));
                }
                nodes.push(node);
            }
        }
    }
    // A test that waits for its turn holds a thread and nothing else.
    arguments.test_threads = Some(AT_ONCE + trials.clusters.len());
    let first = trials.clusters.into_iter().chain(trials.beside).collect();
    let mut has_failed = libtest_mimic::run(&arguments, first).has_failed();
    arguments.test_threads = Some(1);
    has_failed |= libtest_mimic::run(&arguments, trials.saturating).has_failed();
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
    if stopped && !has_failed { ExitCode::SUCCESS } else { ExitCode::FAILURE }
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
    /// With labs.
    clusters: Vec<Trial>,
    beside: Vec<Trial>,
    /// One after the other, when the rest is through.
    saturating: Vec<Trial>,
}

impl Trials {
    fn add(&mut self, order: &Order, suite: &Suite, name: &str, test: impl FnOnce() + Send + 'static) {
        let name = format!("{}::{name}", suite.name);
        let is_of = |list: &[&str]| list.iter().any(|beginning| name.starts_with(beginning));
        let (list, turn) = if is_of(order.saturating) {
            (&mut self.saturating, None)
        } else if is_of(order.clusters) {
            (&mut self.clusters, Some(&CLUSTERS))
        } else if is_of(order.labs) {
            (&mut self.clusters, Some(&LABS))
        } else {
            (&mut self.beside, None)
        };
        list.push(trial(name, suite.needs_root, turn, test));
    }
}

fn trial(
    name: String,
    needs_root: bool,
    turn: Option<&'static Places>,
    test: impl FnOnce() + Send + 'static,
) -> Trial {
    Trial::ignorable_test(name.clone(), move || {
        if needs_root && !machine::is_root() {
            return Ok(Completion::ignored_with("needs root"));
        }
        let _turn = turn.map(Places::take);
        let _place = RUNNING.take();
        let begun = Instant::now();
        match catch_unwind(AssertUnwindSafe(test)) {
            Ok(()) => {
                locked(&DURATIONS).push((begun.elapsed(), name));
                Ok(Completion::Completed)
            }
            Err(panic) => match panic.downcast::<Skipped>() {
                Ok(skipped) => Ok(Completion::ignored_with(skipped.0)),
                Err(panic) => Err(text_of(&*panic).into()),
            },
        }
    })
}

/// So many may have one at once.
struct Places {
    free: Mutex<usize>,
    freed: Condvar,
}

struct Place(&'static Places);

impl Places {
    const fn new(count: usize) -> Self {
        Self { free: Mutex::new(count), freed: Condvar::new() }
    }

    /// Before the first is taken.
    fn set(&self, count: usize) {
        *locked(&self.free) = count;
    }

    /// Waits for one.
    fn take(&'static self) -> Place {
        let free = locked(&self.free);
        let mut free = self.freed.wait_while(free, |free| *free == 0).unwrap_or_else(PoisonError::into_inner);
        *free -= 1;
        Place(self)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        *locked(&self.0.free) += 1;
        self.0.freed.notify_one();
    }
}

/// A test that panicked leaves nothing half done behind these locks.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Where the suite's time goes.
fn tell_slowest() {
    let mut all = locked(&DURATIONS);
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
