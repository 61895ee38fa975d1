//! The keeper on the real kernel: its process, started as the supervisor would, and real programs.
//!
//! A harness of its own, because this binary is also the keeper it tests, and because what needs root must
//! be seen to be skipped. With `NAGAYA_ONLY_CELLS` set only what needs controllers of cgroups is tested: on a machine that was
//! made for their sake. Not here: checks of single values; those are beside the code they check.

mod bases;
mod boosts;
mod calls;
mod cells;
mod closed_off;
mod databases;
mod enclosure;
mod exec;
mod faults;
mod files;
mod forged;
mod fresh;
mod groups;
mod image;
mod instances;
mod killed;
mod layers;
mod life;
mod limits;
mod links;
mod logs;
mod machine;
mod mapped;
mod nat;
mod outbound;
mod own_links;
mod php;
mod php_parent;
mod placed;
mod places;
mod pressure;
mod programs;
mod python;
mod quiet;
mod rest;
mod sandbox;
mod scene;
mod seats;
mod shm;
mod swap;
mod transfer;
mod wake;
mod woken;
mod work;
mod world;

use libtest_mimic::{Arguments, Completion, Trial};
use nagaya_keeper::CellMechanism;

/// One test: its name, and what panics if it is not so.
pub type Fact = (&'static str, fn());

/// One that finds out when it runs whether it can. The error: why not.
pub type FoundFact = (&'static str, fn() -> Result<(), String>);

/// One that is true only where the keeper has these controllers.
pub type CellFact = (&'static [&'static str], &'static str, fn());

/// Runs as nagaya's own program, in the sandbox of a machine, if it is started as that.
fn run_machine_program() {
    let words: Vec<_> = std::env::args_os().skip(1).collect();
    let ended = words.split_first().and_then(|(word, others)| nagaya_machine::run_program(word, others));
    match ended {
        None => {}
        Some(Ok(status)) => std::process::exit(status.into()),
        Some(Err(error)) => {
            eprintln!("{error}");
            std::process::exit(1);
        }
    }
}

fn main() {
    if world::is_keeper() {
        world::keeper_main();
    }
    run_machine_program();
    let arguments = Arguments::from_args();
    let is_root = rustix::process::geteuid().is_root();
    if is_root {
        scene::start_launcher();
    }
    let any = [programs::ANYONE, life::ANYONE, rest::ANYONE].concat();
    let root = with_root();
    let (v1, v2) = (is_mounted("cgroup"), is_mounted("cgroup2"));
    let trial = |(name, fact): &Fact, missing: Option<&'static str>| {
        let fact = *fact;
        Trial::ignorable_test(*name, move || {
            if let Some(missing) = missing {
                return Ok(Completion::ignored_with(missing));
            }
            fact();
            Ok(Completion::Completed)
        })
    };
    let of_root = |fact: &Fact| {
        let missing = match fact.0.rsplit_once(" on cgroup ") {
            _ if !is_root => Some("needs root"),
            Some((_, "v1")) if !v1 => Some("cgroup v1 is not mounted"),
            Some((_, "v2")) if !v2 => Some("cgroup v2 is not mounted"),
            _ => None,
        };
        trial(fact, missing)
    };
    let of_criu = |fact: &Fact| trial(fact, if is_root { image::missing() } else { Some("needs root") });
    let trials = any.iter().map(|fact| trial(fact, None)).chain(root.iter().map(of_root));
    let with_criu = with_criu();
    let trials = trials.chain(with_criu.iter().map(of_criu));
    let trials = trials.chain(
        swap::ROOT
            .iter()
            .chain(pressure::ROOT)
            .chain(bases::ROOT)
            .chain(databases::FOUND)
            .chain(machine::FOUND)
            .chain(woken::FOUND)
            .map(of_found),
    );
    // Where both are mounted the keeper takes of each what it is best for; v1 must do alone, too.
    let back_ends =
        if v1 && v2 { &[CellMechanism::Auto, CellMechanism::CgroupV1][..] } else { &[CellMechanism::Auto] };
    let facts = on_controllers();
    let on_cells = back_ends.iter().flat_map(|back_end| facts.iter().map(|fact| of_cells(fact, *back_end)));
    let only_cells = std::env::var_os("NAGAYA_ONLY_CELLS").is_some();
    let trials = if only_cells { on_cells.collect() } else { trials.chain(on_cells).collect() };
    libtest_mimic::run(&arguments, trials).exit();
}

/// All that need root and nothing else.
fn with_root() -> Vec<Fact> {
    [
        programs::ROOT,
        files::ROOT,
        closed_off::CLOSED_OFF,
        links::ROOT,
        own_links::ROOT,
        calls::ROOT,
        enclosure::ROOT,
        php::ROOT,
        php_parent::ROOT,
        instances::ROOT,
        logs::ROOT,
        exec::ROOT,
        faults::ROOT,
        outbound::ROOT,
        databases::ROOT,
        nat::ROOT,
        rest::ROOT,
        work::ROOT,
        life::ROOT,
        killed::ROOT,
        sandbox::ROOT,
    ]
    .concat()
}

/// All that need a CRIU.
fn with_criu() -> Vec<Fact> {
    [
        image::CRIU,
        mapped::MAPPED,
        shm::CRIU,
        fresh::CRIU,
        wake::CRIU,
        woken::CRIU,
        killed::CRIU,
        faults::CRIU,
        outbound::CRIU,
        nat::CRIU,
        transfer::CRIU,
        forged::CRIU,
    ]
    .concat()
}

/// All that need controllers of cgroups.
fn on_controllers() -> Vec<CellFact> {
    [
        cells::CELLS,
        places::CELLS,
        limits::CELLS,
        instances::CELLS,
        seats::CELLS,
        boosts::CELLS,
        quiet::CELLS,
        faults::CELLS,
        placed::CELLS,
    ]
    .concat()
}

fn of_cells((needs, name, fact): &CellFact, back_end: CellMechanism) -> Trial {
    let (needs, fact) = (*needs, *fact);
    let alone = if back_end == CellMechanism::CgroupV1 { ", with cgroup v1 alone" } else { "" };
    Trial::ignorable_test(format!("{name}{alone}"), move || {
        world::BACK_END.set(back_end);
        let is_root = rustix::process::geteuid().is_root();
        let missing = if is_root { groups::missing(needs) } else { Some("needs root".into()) };
        if let Some(missing) = missing {
            return Ok(Completion::ignored_with(missing));
        }
        fact();
        Ok(Completion::Completed)
    })
}

/// Whether a file system of this kind is mounted anywhere.
fn is_mounted(kind: &str) -> bool {
    let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    mounts.lines().any(|line| line.split(' ').nth(2) == Some(kind))
}

/// Of root, and of what is found out only when it runs.
fn of_found((name, fact): &FoundFact) -> Trial {
    let fact = *fact;
    Trial::ignorable_test(*name, move || {
        if !rustix::process::geteuid().is_root() {
            return Ok(Completion::ignored_with("needs root"));
        }
        Ok(fact().map_or_else(Completion::ignored_with, |()| Completion::Completed))
    })
}
