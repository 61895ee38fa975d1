//! Tests of settling: how long an end is held back, and what is not.

use std::collections::VecDeque;
use std::future::poll_fn;

use http::StatusCode;
use nagaya_records::cell::{Confinement, CpuQuota, LimitSet, RequestUsage};
use tokio::task::{LocalSet, spawn_local};

use super::*;
use crate::http::body_adapters::{FrameResult, PolledBody};
use crate::record::execution::PendingUsage;

/// A body of pieces, each a while after the one before. The program has ended when this is dropped, and has used what
/// `due` says then.
struct Pieces {
    pieces: VecDeque<&'static str>,
    every: Duration,
    pause: Pin<Box<tokio::time::Sleep>>,
    due: Option<(PendingUsage, u64)>,
}

impl Drop for Pieces {
    fn drop(&mut self) {
        if let Some((due, cpu_us)) = self.due.take() {
            spawn_local(async move { due.report(RequestUsage { cpu_us, ..RequestUsage::default() }) });
        }
    }
}

impl Pieces {
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Option<FrameResult>> {
        ready!(self.pause.as_mut().poll(cx));
        self.pause.as_mut().reset(Instant::now() + self.every);
        Poll::Ready(
            self.pieces.pop_front().map(|piece| Ok(Frame::data(Bytes::from_static(piece.as_bytes())))),
        )
    }
}

fn percent(percent: u32) -> Rc<CellExecution> {
    let limits = LimitSet { cpu: Some(CpuQuota::of_core(percent * 10)), ..LimitSet::default() };
    CellExecution::new(Confinement { limits, ..Confinement::default() })
}

fn debt(execution: &Rc<CellExecution>) -> QuotaDebt {
    let tenant = TenantName::try_from("demo".to_owned()).unwrap();
    QuotaDebt::of(&Arc::default(), &tenant, execution).expect("it has a quota")
}

/// An answer "a", "b" of a program that then takes another 10 ms to its end and has used `cpu_us`.
fn answer(execution: &Rc<CellExecution>, cpu_us: u64, left: Option<u64>, every_ms: u64) -> Response {
    let every = Duration::from_millis(every_ms);
    let due = Some((execution.begin(), cpu_us));
    let pause = Box::pin(tokio::time::sleep(every));
    let mut pieces = Pieces { pieces: VecDeque::from(["a", "b"]), every, pause, due };
    let body = PolledBody::with_len(left, move |cx| pieces.poll(cx));
    Response::new(StatusCode::OK).with_body(ResponseBody::stream(body))
}

/// When each piece came and when the end did, milliseconds.
async fn times(response: Response) -> Vec<(String, u64)> {
    let start = Instant::now();
    let ResponseBody::Stream(mut body) = response.body else { panic!("a stream stays one") };
    let mut times = Vec::new();
    loop {
        let frame = poll_fn(|cx| body.as_mut().poll_frame(cx)).await;
        let ms = u64::try_from(start.elapsed().as_millis()).unwrap();
        let Some(frame) = frame else {
            times.push(("end".to_owned(), ms));
            return times;
        };
        let data = frame.unwrap().into_data().unwrap();
        times.push((String::from_utf8(data.to_vec()).unwrap(), ms));
    }
}

fn run<F: Future>(test: F) -> F::Output {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
    LocalSet::new().block_on(&runtime, test)
}

fn told(times: &[(String, u64)]) -> Vec<&str> {
    times.iter().map(|(what, _)| what.as_str()).collect()
}

#[test]
fn only_the_end_of_a_stream_waits() {
    run(async {
        let execution = percent(50);
        let debt = debt(&execution);
        let times = times(debt.hold(answer(&execution, 100_000, None, 10)).await).await;
        assert_eq!(told(&times), ["a", "b", "end"]);
        assert!(times[0].1 <= 11 && times[1].1 <= 22, "{times:?}");
        assert!((195..=200).contains(&times[2].1), "100 ms at half a core: {times:?}");
        assert!((160_000..=180_000).contains(&execution.paced_us()), "{}", execution.paced_us());
    });
}

#[test]
fn of_a_known_length_the_last_piece_waits_because_it_is_the_end() {
    run(async {
        let execution = percent(10);
        let debt = debt(&execution);
        let response = debt.hold(answer(&execution, 50_000, Some(2), 10)).await;
        assert_eq!(response.body.len(), Some(2));
        let times = times(response).await;
        assert_eq!(told(&times), ["a", "b", "end"]);
        assert!(times[0].1 <= 11 && (495..=500).contains(&times[1].1), "{times:?}");
    });
}

#[test]
fn answer_slower_than_its_quota_wants_is_not_held_back() {
    run(async {
        let execution = percent(50);
        let debt = debt(&execution);
        let times = times(debt.hold(answer(&execution, 1_000, None, 10)).await).await;
        assert!(times[2].1 <= 33, "{times:?}");
        assert_eq!(execution.paced_us(), 0);
    });
}

#[test]
fn no_end_is_held_back_for_longer_than_the_bound() {
    run(async {
        let execution = percent(1);
        let debt = debt(&execution);
        let times = times(debt.hold(answer(&execution, 3_600_000_000, None, 10)).await).await;
        assert!((10_000..=10_050).contains(&times[2].1), "{times:?}");
    });
}

#[test]
fn program_that_runs_on_after_its_answer_frees_its_client() {
    run(async {
        let execution = percent(50);
        let debt = debt(&execution);
        let times = times(debt.hold(answer(&execution, 1_000, Some(2), 60_000)).await).await;
        assert!((122_000..=122_050).contains(&times[1].1), "{times:?}");
        assert!(execution.is_all_reported(), "it was ended");
    });
}

#[test]
fn a_use_that_is_never_told_holds_nothing_back_for_long() {
    run(async {
        let execution = percent(1);
        let debt = debt(&execution);
        let due = execution.begin();
        let start = Instant::now();
        debt.settle().await;
        assert!(start.elapsed() <= Duration::from_millis(2050));
        drop(due);
    });
}

#[test]
fn without_a_quota_there_is_no_debt() {
    let tenant = TenantName::try_from("demo".to_owned()).unwrap();
    assert!(QuotaDebt::of(&Arc::default(), &tenant, &CellExecution::new(Confinement::default())).is_none());
}
