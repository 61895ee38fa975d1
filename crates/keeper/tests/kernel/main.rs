//! The keeper on the real kernel: its process, started as the supervisor would, and real programs.
//!
//! A harness of its own, because this binary is also the keeper it tests, and because what needs root must
//! be seen to be skipped. Not here: checks of single values; those are beside the code they check.

mod apps;
mod files;
mod life;
mod php;
mod programs;
mod world;

use libtest_mimic::{Arguments, Trial};

/// One test: its name, and what panics if it is not so.
pub type Fact = (&'static str, fn());

fn main() {
    if world::is_keeper() {
        world::keeper_main();
    }
    let arguments = Arguments::from_args();
    let is_root = rustix::process::geteuid().is_root();
    let any = [programs::ANYONE, life::ANYONE].concat();
    let root = [programs::ROOT, files::ROOT, php::ROOT, apps::ROOT, life::ROOT].concat();
    let trial = |(name, fact): &Fact| {
        let fact = *fact;
        Trial::test(*name, move || {
            fact();
            Ok(())
        })
    };
    let mut trials: Vec<Trial> = any.iter().map(trial).collect();
    trials.extend(root.iter().map(|fact| trial(fact).with_ignored_flag(!is_root)));
    if !is_root {
        println!("skipped: {} tests of uids and cgroups need root (counted as ignored below)", root.len());
    }
    libtest_mimic::run(&arguments, trials).exit();
}
