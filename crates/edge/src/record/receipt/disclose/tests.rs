//! Tests of what a client is told: the fields, and when the figures come in a trailer.

use http::StatusCode;
use nagaya_records::cell::{Boost, Confinement, CpuQuota, RequestUsage};
use nagaya_records::instance::{Tier, WakeStage};
use tokio::sync::mpsc;

use super::*;
use crate::backends::programs::testing::arriving;
use crate::record::access_record::UsageScope;

fn disclosure(execution: Option<Rc<CellExecution>>) -> ReceiptDisclosure {
    let figures =
        ReceiptFigures { took_us: 1_234, queue_us: 1_000, cpu_us: Some(56), ..ReceiptFigures::default() };
    ReceiptDisclosure {
        id: RequestId(0xabc),
        node: "n\"1\n".into(),
        begun: Instant::now(),
        figures,
        wake: None,
        execution,
        split: None,
    }
}

type Sender = mpsc::Sender<Result<Bytes, BodyError>>;

/// A body that comes as the test sends it.
fn stream() -> (Sender, ResponseBody) {
    let (sender, body) = arriving(None);
    (sender, ResponseBody::stream(body))
}

fn execution() -> Rc<CellExecution> {
    let execution = CellExecution::of(Confinement::default(), true);
    execution.set_cell("demo/wiki/r1".into());
    execution
}

#[test]
fn an_answer_that_is_all_there_has_its_last_figures_in_the_head() {
    let mut response = Response::new(StatusCode::OK).with_body(ResponseBody::Bytes(Bytes::from_static(b"x")));
    response.headers.append(SERVER_TIMING, HeaderValue::from_static("db;dur=3"));
    disclosure(Some(execution())).put(&mut response);
    assert_eq!(
        response.headers["nagaya-receipt"],
        "id=\"00000000000000000000000000000abc\", node=\"n\\\"1\", cell=\"demo/wiki/r1\", took=1234, queue=1000, \
         rules=0, backend=0, cpu=56, read=0, write=0, throttled=0, paced=0, demoted=0"
    );
    let timing: Vec<_> = response.headers.get_all(SERVER_TIMING).iter().collect();
    assert_eq!(timing, ["db;dur=3", "total;dur=1.234, queue;dur=1.000, cpu;dur=0.056"]);
    assert!(!response.headers.contains_key(TRAILER));
    assert!(matches!(response.body, ResponseBody::Bytes(_)));
}

#[test]
fn an_applications_cell_says_whose_it_is() {
    let execution = CellExecution::of(Confinement::default(), true);
    execution.set_cell_of("demo/blog/r2", UsageScope::Instance);
    execution.set_raised(Boost { cpu: Some(CpuQuota::of_core(1_500)), cpu_shares: None });
    let mut response = Response::new(StatusCode::OK);
    disclosure(Some(execution)).put(&mut response);
    let receipt = response.headers["nagaya-receipt"].to_str().unwrap();
    assert!(receipt.contains(", cell=\"demo/blog/r2\";of=instance, raised=\"cpu=150%\", took="), "{receipt}");
}

#[test]
fn a_wake_says_where_it_began_and_what_each_stage_took() {
    let mut told = disclosure(None);
    told.wake = Some(Arc::new(WakeReport {
        from: Tier::Image,
        stages: vec![(WakeStage::Decide, 90), (WakeStage::Restore, 38_000), (WakeStage::Ready, 0)],
        predicted_us: Some(80),
    }));
    (told.figures.wake_us, told.figures.backend_us) = (39_000, 2_000);
    let mut response = Response::new(StatusCode::OK);
    told.put(&mut response);
    let receipt = response.headers["nagaya-receipt"].to_str().unwrap();
    let wake =
        ", wake=39000;from=image;decide=90;restore=38000;ready=0;first_byte=2000;predicted=80, backend=2000";
    assert!(receipt.contains(wake), "{receipt}");
    assert_eq!(
        response.headers[SERVER_TIMING],
        "total;dur=1.234, queue;dur=1.000, wake;dur=39.000, backend;dur=2.000, cpu;dur=0.056, wake-decide;dur=0.090, \
         wake-restore;dur=38.000, wake-ready;dur=0.000, wake-first_byte;dur=2.000"
    );
}

#[tokio::test(start_paused = true)]
async fn a_stream_is_followed_by_what_it_used_in_the_end() {
    let (sender, body) = stream();
    let execution = execution();
    let due = execution.begin();
    let mut response = Response::new(StatusCode::OK).with_body(body);
    disclosure(Some(Rc::clone(&execution))).put(&mut response);
    let receipt = response.headers["nagaya-receipt"].to_str().unwrap().to_owned();
    assert!(receipt.ends_with(", partial"), "{receipt}");
    assert_eq!(response.headers[TRAILER], "nagaya-receipt");
    let ResponseBody::Stream(mut body) = response.body else { panic!("a stream stays one") };
    sender.send(Ok(Bytes::from_static(b"x"))).await.unwrap();
    assert_eq!(body.frame().await.unwrap().unwrap().into_data().unwrap(), "x");
    drop(sender);
    let last = body.frame();
    tokio::pin!(last);
    let now = poll_fn(|cx| Poll::Ready(last.as_mut().poll(cx))).await;
    assert!(now.is_pending(), "what it used is not known yet");
    due.report(RequestUsage { cpu_us: 777, write_bytes: 8, ..RequestUsage::default() });
    let trailers = last.await.unwrap().unwrap().into_trailers().unwrap();
    let receipt = trailers["nagaya-receipt"].to_str().unwrap();
    assert!(receipt.contains("cpu=777, read=0, write=8") && !receipt.contains("partial"), "{receipt}");
    assert!(body.frame().await.is_none() && body.is_end_stream());
}

#[tokio::test(start_paused = true)]
async fn a_small_answer_that_ends_soon_is_waited_for() {
    let (sender, body) = stream();
    let gathering = async {
        let ResponseBody::Bytes(all) = gather(body).await else { panic!("it ended") };
        assert_eq!(all, "one two");
    };
    let sending = async {
        sender.send(Ok(Bytes::from_static(b"one"))).await.unwrap();
        tokio::time::sleep(GATHER_TIME / 2).await;
        sender.send(Ok(Bytes::from_static(b" two"))).await.unwrap();
        drop(sender);
    };
    tokio::join!(gathering, sending);
}

#[tokio::test(start_paused = true)]
async fn long_or_large_body_is_not_waited_for_and_loses_nothing() {
    let (sender, body) = stream();
    sender.send(Ok(Bytes::from_static(b"one"))).await.unwrap();
    let start = tokio::time::Instant::now();
    let ResponseBody::Stream(body) = gather(body).await else { panic!("it goes on") };
    assert_eq!(start.elapsed().as_secs(), GATHER_TIME.as_secs());
    let rest = tokio::spawn(async move {
        sender.send(Ok(Bytes::from_static(b" two"))).await.unwrap();
    });
    assert_eq!(body.collect().await.unwrap().to_bytes(), "one two");
    rest.await.unwrap();

    let (sender, body) = stream();
    sender.send(Ok(Bytes::from(vec![1; GATHER_MAX + 1]))).await.unwrap();
    let ResponseBody::Stream(mut body) = gather(body).await else { panic!("it is large") };
    assert_eq!(body.frame().await.unwrap().unwrap().into_data().unwrap().len(), GATHER_MAX + 1);
    sender.send(Err(BodyError::ClientGone)).await.unwrap();
    assert!(body.frame().await.unwrap().is_err());
}

#[test]
fn a_name_cannot_end_its_string() {
    let mut out = String::new();
    push_string(&mut out, "a\"b\\c\r\nd\u{e9}");
    assert_eq!(out, r#""a\"b\\cd""#);
}
