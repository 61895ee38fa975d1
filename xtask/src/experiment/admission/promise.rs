//! `admission-promise`: a flash crowd of ten times the site's capacity. Clients honour their
//! tickets, three in ten never come back, and the edge is killed in the middle. Are promises kept?
//!
//! Not here: the other experiments.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::io::{Read as _, Write as _};
use std::net::Ipv4Addr;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};
use tokio::time::sleep;

use super::crowd::{self, PostingCrowd, SeenAnswer, SentPost, percentile, times_ms};
use super::{HOST, post, serve};
use crate::clients::to_float;
use crate::experiment::harness::ExperimentSetting;
use crate::plot::Chart;
use crate::report::{Bound, Goal, Report};
use crate::server::nagaya::NagayaNode;

const RUN: u32 = 8;

/// Longest predicted wait in the queue, seconds: short, so that most get tickets.
const WAIT_SECONDS: u32 = 5;

/// Length of a slot.
const SLOT: Duration = Duration::from_secs(10);

/// The crowd, in times of the site's capacity.
const TIMES: f64 = 10.0;

/// Out of ten ticket holders, the number that never come back, and the number that listen for a
/// call.
const NEVER_OF_TEN: u64 = 3;
const LISTEN_OF_TEN: u64 = 2;

/// Bytes of a message.
const BYTES: usize = 1 << 10;

/// Interval of checks of the lane.
const LOOK_EVERY: Duration = Duration::from_millis(250);

/// Retries of a client whose connection was cut: the edge is killed under some.
const RETRIES_MAX: u32 = 20;

const GOALS: [Goal; 2] = [
    Goal { key: "promises_kept_pct", bound: Bound::AtLeast(99.9), aim: 100.0 },
    Goal { key: "idle_capacity_pct", bound: Bound::AtMost(5.0), aim: 1.0 },
];

/// Outcome of one ticket, from its client's side.
#[derive(Debug, Clone, PartialEq)]
enum TicketFate {
    NeverCame,
    Called,
    InTime,
    /// It came in time and ran after its slot's end, by this many milliseconds.
    Late(f64),
    Failed(PromiseFailure),
}

/// A response other than the promised one, to a client that came when it might.
#[derive(Debug, Clone, PartialEq)]
struct PromiseFailure {
    status: u16,
    /// The error that the response names, or why there was none.
    code: String,
    was_called: bool,
    /// How often its connection was cut before it got this response.
    cut: u32,
    /// Seconds since the crowd began at which it came.
    came: f64,
}

pub fn run(setting: &ExperimentSetting) -> Result<()> {
    let mut report = Report::new("admission-promise");
    let record = json!({
        "max_concurrent": RUN,
        "admission": {"wait_seconds": WAIT_SECONDS, "slot_seconds": SLOT.as_secs(), "tickets": true},
    });
    let (node, server) =
        serve(setting, "nagaya", "[admission]\nhorizon = \"4h\"\ntickets_max = 100000\n", record)?;
    let post = post(&server, HOST, BYTES);
    // The site's capacity, and its training.
    let warm = Duration::from_secs(6);
    let seen = crowd::closed(&post, 16, warm, Duration::ZERO)?;
    let capacity = to_float(times_ms(&seen).len()) / warm.as_secs_f64();
    ensure!(capacity > 1.0, "the board answers {capacity:.1} requests a second");
    let crowd_for = Duration::from_secs(if setting.quick { 15 } else { 120 });
    report.note("capacity, requests a second", json!(capacity));
    report.note("seconds of the crowd, times capacity", json!([crowd_for.as_secs(), TIMES]));
    report.note("slot, seconds; line, seconds", json!([SLOT.as_secs(), WAIT_SECONDS]));

    let stop = Arc::new(AtomicBool::new(false));
    let watching = watch(&node, Arc::clone(&stop));
    let (fates, refused, killed) = flash(&node, &post, capacity * TIMES, crowd_for)?;
    stop.store(true, Ordering::Relaxed);
    let idle = watching.join().map_err(|_| anyhow::anyhow!("the watch panicked"))?;

    let count = |of: fn(&TicketFate) -> bool| to_float(fates.iter().filter(|fate| of(fate)).count());
    let kept = count(|fate| matches!(fate, TicketFate::InTime | TicketFate::Called));
    let late: Vec<f64> = fates
        .iter()
        .filter_map(|fate| if let TicketFate::Late(by) = fate { Some(*by) } else { None })
        .collect();
    let failed = count(|fate| matches!(fate, TicketFate::Failed(_)));
    let broken = to_float(late.len()) + failed;
    report.note("failed, by answer; seconds after the kill", failures(&fates, killed));
    report.set("promises_made", to_float(fates.len()));
    report.set("never_came", count(|fate| *fate == TicketFate::NeverCame));
    report.set("promises_kept_pct", kept / (kept + broken) * 100.0);
    report.set("late", to_float(late.len()));
    report.set("late_p99_ms", if late.is_empty() { 0.0 } else { percentile(late, 0.99) });
    report.set("failed", failed);
    report.set("early_called_pct", count(|fate| *fate == TicketFate::Called) / kept * 100.0);
    report.set("without_ticket", to_float(refused));
    report.set("idle_capacity_pct", percentile(vec![mean(&idle)], 0.5));
    report.sample(0, "crowd", "kept", "tickets", kept);
    report.sample(0, "crowd", "broken", "tickets", broken);
    report.sample(0, "crowd", "never came", "tickets", count(|fate| *fate == TicketFate::NeverCame));
    let chart = Chart {
        title: "Promises of a flash crowd".into(),
        subtitle:
            "ten times what the site can do; three in ten never return; the edge is killed in the middle"
                .into(),
        panels: vec![report.panel(
            "Tickets",
            "tickets",
            "crowd",
            "tickets",
            &["kept", "broken", "never came"],
        )],
    };
    report.write(&setting.out, &chart, &GOALS)
}

/// Returns the responses to clients whose promise failed, the number of each, and when.
fn failures(fates: &[TicketFate], killed: f64) -> Value {
    let mut kinds: BTreeMap<String, (usize, f64, f64)> = BTreeMap::new();
    for fate in fates {
        let TicketFate::Failed(failure) = fate else { continue };
        let kind = format!(
            "{} {}, {}{}",
            failure.status,
            failure.code,
            if failure.was_called { "called" } else { "in its slot" },
            if failure.cut > 0 { ", was cut before" } else { "" },
        );
        let after = failure.came - killed;
        let (count, first, last) = kinds.entry(kind).or_insert((0, after, after));
        (*count, *first, *last) = (*count + 1, first.min(after), last.max(after));
    }
    let row = |(count, first, last): (usize, f64, f64)| json!({"count": count, "first": first, "last": last});
    kinds.into_iter().map(|(kind, row_of)| (kind, row(row_of))).collect::<serde_json::Map<_, _>>().into()
}

/// Runs the crowd to the end of its last slot. Returns the outcome of each ticket, how many clients
/// got none, and the second at which the edge was killed.
fn flash(
    node: &NagayaNode,
    post: &SentPost,
    per_second: f64,
    crowd_for: Duration,
) -> Result<(Vec<TicketFate>, usize, f64)> {
    let fates = Rc::new(std::cell::RefCell::new(Vec::new()));
    let refused = Rc::new(Cell::new(0));
    let killed = Rc::new(Cell::new(Ok(0.0)));
    let (to, none, post, kill) = (Rc::clone(&fates), Rc::clone(&refused), post.clone(), node.clone());
    let result = Rc::clone(&killed);
    PostingCrowd::run(move |crowd| async move {
        let mut clients = Vec::new();
        let (mut come, mut is_killed) = (0_u64, false);
        while crowd.elapsed() < crowd_for {
            if !is_killed && crowd.elapsed() > crowd_for / 2 {
                is_killed = true;
                let at = crowd.elapsed().as_secs_f64();
                result.set(kill_edge(&kill).map(|()| at));
            }
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a count of clients")]
            let due = (crowd.elapsed().as_secs_f64() * per_second) as u64;
            while come < due {
                let (crowd, post, to, none) =
                    (Rc::clone(&crowd), post.clone(), Rc::clone(&to), Rc::clone(&none));
                clients.push(tokio::task::spawn_local(async move {
                    match client(&crowd, &post, come).await {
                        Some(fate) => to.borrow_mut().push(fate),
                        None => none.set(none.get() + 1),
                    }
                }));
                come += 1;
            }
            sleep(Duration::from_millis(5)).await;
        }
        for client in clients {
            // A panic of a client was reported; its ticket is missing in the count.
            let _ = client.await;
        }
    })?;
    let killed = killed.replace(Ok(0.0))?;
    Ok((fates.take(), refused.get(), killed))
}

/// Runs one person. `None` if it was served at once, or got no ticket.
async fn client(crowd: &PostingCrowd, post: &SentPost, number: u64) -> Option<TicketFate> {
    let from = address(number);
    let (first, _) = ask(crowd, post, from, None).await;
    let (Some(ticket), Some(after)) = (first.ticket, first.retry_after) else {
        return None;
    };
    // The same clients each time: a number decides, not chance.
    let kind = number.wrapping_mul(2_654_435_761) >> 7;
    if kind % 10 < NEVER_OF_TEN {
        return Some(TicketFate::NeverCame);
    }
    let began = tokio::time::Instant::now();
    let begins = Duration::from_secs_f64(after);
    let mut is_called = false;
    if kind % 10 < NEVER_OF_TEN + LISTEN_OF_TEN {
        is_called = crowd.listen(post, from, &ticket, begins).await && began.elapsed() < begins;
    }
    if !is_called {
        // People come some time after a call.
        let within = SLOT.mul_f64(0.6 * to_float(usize::try_from(kind / 10 % 1000).unwrap_or(0)) / 1000.0);
        tokio::time::sleep_until(began + begins + within).await;
    }
    let at = crowd.elapsed().as_secs_f64();
    let (came, cut) = ask(crowd, post, from, Some(&ticket)).await;
    if came.status != 200 {
        let code = came.code.or(came.why).unwrap_or_default();
        return Some(TicketFate::Failed(PromiseFailure {
            status: came.status,
            code,
            was_called: is_called,
            cut,
            came: at,
        }));
    }
    let ended = began.elapsed();
    let run = came.took_ms - came.queued_ms.unwrap_or(0.0);
    let started = ended.saturating_sub(Duration::from_secs_f64(run.max(0.0) / 1e3));
    let end = begins + SLOT;
    Some(match started.checked_sub(end) {
        Some(over) => TicketFate::Late(over.as_secs_f64() * 1e3),
        None if is_called => TicketFate::Called,
        None => TicketFate::InTime,
    })
}

/// Sends a request, and repeats it if the connection was cut; returns how often it was.
async fn ask(
    crowd: &PostingCrowd,
    post: &SentPost,
    from: Ipv4Addr,
    ticket: Option<&str>,
) -> (SeenAnswer, u32) {
    let mut cut = 0;
    loop {
        let seen = crowd.ask(post, Some(from), ticket).await;
        if seen.status != 0 || cut == RETRIES_MAX {
            return (seen, cut);
        }
        cut += 1;
        sleep(Duration::from_millis(500)).await;
    }
}

/// Returns an address for each client: the whole of 127.0.0.0/8 is the loopback.
fn address(number: u64) -> Ipv4Addr {
    let number = u32::try_from(number).unwrap_or(u32::MAX) + 0x0100;
    Ipv4Addr::from(0x7f01_0000_u32.wrapping_add(number) & 0x7fff_ffff)
}

fn kill_edge(node: &NagayaNode) -> Result<()> {
    let status: Value =
        serde_json::from_str(&node.run(&["status", "--json"])?).context("reading the status")?;
    let processes = status["processes"].as_array().context("the status names no processes")?;
    let edge =
        processes.iter().find(|process| process["name"] == json!("edge")).context("there is no edge")?;
    let pid = edge["pid"].as_i64().and_then(|pid| i32::try_from(pid).ok()).context("the edge has no pid")?;
    let pid = rustix::process::Pid::from_raw(pid).context("no pid")?;
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).context("killing the edge")
}

/// Checks the lane repeatedly: how much of its capacity was idle each time a request waited.
fn watch(node: &NagayaNode, stop: Arc<AtomicBool>) -> std::thread::JoinHandle<Vec<f64>> {
    let socket = node.admin_socket();
    std::thread::spawn(move || {
        let mut idle = Vec::new();
        while !stop.load(Ordering::Relaxed) {
            std::thread::sleep(LOOK_EVERY);
            // Nothing answers while the edge is restarted.
            let Ok(lane) = look(&socket) else { continue };
            let (Some(running), Some(waiting)) = (lane["running"].as_f64(), lane["waiting"].as_f64()) else {
                continue;
            };
            if waiting > 0.0 {
                idle.push((f64::from(RUN) - running).max(0.0) / f64::from(RUN) * 100.0);
            }
        }
        idle
    })
}

fn look(socket: &PathBuf) -> Result<Value> {
    let mut stream = UnixStream::connect(socket).context("connecting")?;
    stream
        .write_all(b"GET /v1/requests HTTP/1.1\r\nHost: node\r\nConnection: close\r\n\r\n")
        .context("asking")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).context("reading")?;
    let (_, body) = answer.split_once("\r\n\r\n").context("an answer without a head")?;
    let body: Value = serde_json::from_str(body).context("reading JSON")?;
    let lanes = body["lanes"].as_array().context("no lanes")?;
    let lane = lanes.iter().find(|lane| lane["of"] == json!("site")).context("no lane of a site")?;
    Ok(lane.clone())
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / to_float(values.len().max(1))
}
