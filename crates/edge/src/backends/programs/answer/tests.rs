//! Facts about answers, whatever program they come from.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use proptest::prelude::*;
use tokio::time::Instant;

use super::*;
use crate::backends::programs::patience::{ProgramTimeouts, UNDISTURBED_MAX};
use crate::backends::programs::testing::{piece, read};

/// Output that is known beforehand. `None` in it stands for output that comes later.
struct Script {
    steps: VecDeque<Option<Result<Bytes, ProgramFailure>>>,
    may_finish: Rc<Cell<Option<(Duration, Duration)>>>,
}

impl OutputSource for Script {
    fn poll_output(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<Bytes>, ProgramFailure>> {
        match self.steps.pop_front() {
            Some(Some(step)) => Poll::Ready(step.map(Some)),
            Some(None) => {
                cx.waker().wake_by_ref();
                Poll::Pending
            }
            None => Poll::Ready(Ok(None)),
        }
    }

    fn fed(&self) -> u64 {
        0
    }

    fn let_finish(self, linger: LingerTimes) {
        let now = Instant::now();
        self.may_finish.set(Some((linger.read_until - now, linger.end - now)));
    }

    fn autopsy(self) -> FailureInquiry {
        Box::pin(async { None })
    }
}

fn piece_of(text: &str) -> Option<Result<Bytes, ProgramFailure>> {
    Some(Ok(Bytes::copy_from_slice(text.as_bytes())))
}

struct Run {
    output: TimedOutput<Script>,
    may_finish: Rc<Cell<Option<(Duration, Duration)>>>,
}

fn run_of(steps: impl IntoIterator<Item = Option<Result<Bytes, ProgramFailure>>>) -> Run {
    let may_finish = Rc::default();
    let script = Script { steps: steps.into_iter().collect(), may_finish: Rc::clone(&may_finish) };
    let patience =
        ProgramTimeouts { silence: Duration::from_secs(20), end: None, linger: Duration::from_secs(5) };
    Run { output: TimedOutput::new(script, ProgramAlarm::new(patience, None)), may_finish }
}

async fn answer(mut output: TimedOutput<Script>, method: Method) -> Result<Response, ProgramFailure> {
    let (head, rest) = output.head().await?;
    match output.outcome(&method, head, rest).await? {
        ProgramOutcome::Response(response) => Ok(response),
        ProgramOutcome::LocalRedirect { .. } => panic!("no script here redirects"),
    }
}

#[tokio::test]
async fn an_answer_that_is_all_there_has_its_length() {
    let run = run_of([piece_of("X-A: 1\n\nhel"), piece_of("lo")]);
    let response = answer(run.output, Method::GET).await.unwrap();
    assert!(matches!(&response.body, ResponseBody::Bytes(bytes) if bytes == "hello"));
}

#[tokio::test]
async fn an_answer_that_is_not_all_there_streams() {
    let run = run_of([piece_of("X-A: 1\n\nhel"), None, piece_of("lo")]);
    let mut response = answer(run.output, Method::GET).await.unwrap();
    assert_eq!(response.body.len(), None);
    assert_eq!(piece(&mut response).await.unwrap().unwrap(), "hel");
    assert_eq!(read(&mut response).await.unwrap(), b"lo");
}

#[tokio::test]
async fn a_failure_before_anything_was_sent_is_a_refusal() {
    let run = run_of([piece_of("X-A: 1\n\nhel"), Some(Err(ProgramFailure::Died))]);
    assert!(matches!(answer(run.output, Method::GET).await, Err(ProgramFailure::Died)));
    let run = run_of([piece_of("X-A: 1\n"), Some(Err(ProgramFailure::Died))]);
    assert!(matches!(answer(run.output, Method::GET).await, Err(ProgramFailure::Died)));
}

#[tokio::test]
async fn a_failure_behind_the_declared_length_harms_nobody() {
    for wait in [false, true] {
        let mut steps = vec![piece_of("Content-Length: 5\n\nhello")];
        steps.extend(wait.then_some(None));
        steps.push(Some(Err(ProgramFailure::Died)));
        let mut response = answer(run_of(steps).output, Method::GET).await.unwrap();
        assert_eq!(read(&mut response).await.unwrap(), b"hello");
    }
}

#[tokio::test(start_paused = true)]
async fn program_goes_on_after_a_complete_answer_or_a_lost_client() {
    let (patience, linger) = (Duration::from_secs(20), Duration::from_secs(5));
    for (text, limit) in [
        ("Content-Length: 5\n\nhello", (patience, patience)),
        ("Content-Length: 6\n\nhello", (UNDISTURBED_MAX, linger)),
    ] {
        let run = run_of([piece_of(text), None, None]);
        let mut response = answer(run.output, Method::GET).await.unwrap();
        assert_eq!(piece(&mut response).await.unwrap().unwrap(), "hello");
        assert_eq!(run.may_finish.get(), None);
        drop(response);
        assert_eq!(run.may_finish.get(), Some(limit), "{text:?}");
    }
}

#[tokio::test]
async fn without_a_body_the_output_is_read_and_thrown_away() {
    let steps = || [piece_of("Content-Length: 5\n\nhel"), None, piece_of("lo")];
    let mut response = answer(run_of(steps()).output, Method::HEAD).await.unwrap();
    assert_eq!(response.body.len(), Some(5));
    assert!(piece(&mut response).await.is_none());
    let run = run_of([piece_of("Status: 304\nETag: \"a\"\n\nhello"), None]);
    let response = answer(run.output, Method::GET).await.unwrap();
    assert!(matches!(response.body, ResponseBody::Empty));
}

#[tokio::test(start_paused = true)]
async fn silence_is_bounded_and_movement_is_not() {
    let patience = ProgramTimeouts { silence: Duration::from_secs(1), end: None, linger: Duration::ZERO };
    let mut silent = TimedOutput::new(Never, ProgramAlarm::new(patience, None));
    let start = Instant::now();
    assert!(matches!(silent.head().await, Err(ProgramFailure::Timeout)));
    assert_eq!(start.elapsed().as_secs(), 1);
    let end = Some(Instant::now() + Duration::from_secs(5));
    let mut moving = TimedOutput::new(
        Ticking(tokio::time::interval(Duration::from_millis(500))),
        ProgramAlarm::new(ProgramTimeouts { end, ..patience }, None),
    );
    let start = Instant::now();
    assert!(matches!(moving.head().await, Err(ProgramFailure::Timeout)));
    assert_eq!(start.elapsed().as_secs(), 5, "movement does not move the end of the whole run");
}

struct Never;

impl OutputSource for Never {
    fn poll_output(&mut self, _: &mut Context<'_>) -> Poll<Result<Option<Bytes>, ProgramFailure>> {
        Poll::Pending
    }

    fn fed(&self) -> u64 {
        0
    }

    fn let_finish(self, _: LingerTimes) {}

    fn autopsy(self) -> FailureInquiry {
        Box::pin(async { None })
    }
}

/// One byte of a head now and then.
struct Ticking(tokio::time::Interval);

impl OutputSource for Ticking {
    fn poll_output(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<Bytes>, ProgramFailure>> {
        self.0.poll_tick(cx).map(|_| Ok(Some(Bytes::from_static(b"X"))))
    }

    fn fed(&self) -> u64 {
        0
    }

    fn let_finish(self, _: LingerTimes) {}

    fn autopsy(self) -> FailureInquiry {
        Box::pin(async { None })
    }
}

proptest! {
    #[test]
    fn a_declared_length_is_kept_or_broken_off(
        pieces in prop::collection::vec(prop::option::weighted(0.7, "[a-z]{1,9}"), 0..8),
        length in 0u64..40,
    ) {
        let output: String = pieces.iter().flatten().map(String::as_str).collect();
        let steps = std::iter::once(piece_of(&format!("Content-Length: {length}\n\n")))
            .chain(pieces.iter().map(|piece| piece.as_deref().and_then(piece_of)));
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let got = runtime.block_on(async {
            let mut response = answer(run_of(steps).output, Method::GET).await.unwrap();
            let told = response.body.len();
            (told, read(&mut response).await)
        });
        prop_assert_eq!(got.0, Some(length));
        match got.1 {
            Ok(body) => prop_assert_eq!(body, &output.as_bytes()[..usize::try_from(length).unwrap()]),
            Err(_) => prop_assert!((output.len() as u64) < length),
        }
    }
}
