//! Facts about PHP scripts, run by real `php-cgi` workers of a real keeper.

use std::time::Duration;

use bytes::Bytes;
use http::Method;
use nagaya_keeper_api::fastcgi::{ConnectionReuse, RequestOpening};
use nagaya_records::cell;
use nagaya_records::cell::{Confinement, CpuQuota};

use crate::backends::intake::testing::kept;
use crate::backends::programs::WORKERS_PER_REQUEST_MAX;
use crate::backends::programs::testing::{
    Thread, World, answering_within, arriving, get, known, piece, post, read, request, text, until,
};
use crate::http::message::{BodyError, RequestBody};
use crate::http::refusal::Refusal;
use crate::options::EdgeConfig;

const PID: &str = "<?php echo getmypid();";

/// With this many workers per tenant. One shows best whether a worker is used again.
fn world(workers: u32) -> World {
    world_with(workers, EdgeConfig::default())
}

fn world_with(workers: u32, options: EdgeConfig) -> World {
    let mut world = World::new("php", "", options);
    world.change_tenant(|tenant| tenant.php_workers = Some(workers));
    world.file("pid.php", PID);
    world
}

/// One worker, whose scripts go on for so long after their clients, seconds.
fn world_lingering(seconds: u32) -> World {
    let more = format!(r#","linger_seconds":{seconds}"#);
    let mut world = World::new("php", &more, EdgeConfig::default());
    world.change_tenant(|tenant| tenant.php_workers = Some(1));
    world.file("pid.php", PID);
    world
}

async fn pid(thread: &Thread) -> u32 {
    thread.get("pid.php").await.parse().expect("a pid")
}

/// The pid of a worker that is free again: once it is known what the request used, so that its thread may stand still.
async fn free_pid(thread: &Thread) -> u32 {
    let execution = thread.confine(Confinement::default(), false);
    let pid = pid(thread).await;
    execution.wait_all_reported().await;
    pid
}

fn signal(pid: u32, signal: rustix::process::Signal) {
    let pid = rustix::process::Pid::from_raw(i32::try_from(pid).unwrap()).unwrap();
    rustix::process::kill_process(pid, signal).unwrap();
}

fn is_running(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(')').next().is_some_and(|rest| !rest.is_empty() && !rest.starts_with(" Z"))
}

#[test]
fn a_script_is_told_about_its_request() {
    let world = world(1);
    world.file(
        "env.php",
        "<?php http_response_code(201); header('X-A: b'); setcookie('a', '1'); setcookie('b', '2');
        foreach (['REQUEST_METHOD', 'SCRIPT_NAME', 'PATH_INFO', 'PHP_SELF', 'HTTP_HOST'] as $name)
            echo $_SERVER[$name], ' ';
        echo $_SERVER['SCRIPT_FILENAME'] === __FILE__ && $_SERVER['DOCUMENT_ROOT'] === __DIR__ ? 'ok' : 'no';",
    );
    world.run(async |thread| {
        let response = thread.response("env.php//a b/c", get()).await;
        assert_eq!(response.status, 201);
        assert_eq!(response.headers["x-a"], "b");
        assert_eq!(response.headers.get_all("set-cookie").iter().count(), 2);
        assert_eq!(response.body.len(), Some(text_len("GET /env.php /a b/c /env.php/a b/c demo ok")));
        assert_eq!(text(response).await, "GET /env.php /a b/c /env.php/a b/c demo ok");
    });
}

fn text_len(text: &str) -> u64 {
    text.len() as u64
}

#[test]
fn a_worker_serves_one_request_after_the_other() {
    let world = world(1);
    world
        .file("noisy.php", "<?php for ($i = 0; $i < 200; $i++) error_log(\"line $i\\e[31m\"); echo 'quiet';");
    world.file("length.php", "<?php echo strlen(file_get_contents('php://input'));");
    world.file("moved.php", "<?php header('Location: /there');");
    world.file("fails.php", "<?php no_such_function();");
    world.run(async |thread| {
        let first = pid(&thread).await;
        assert_eq!(thread.get("noisy.php").await, "quiet");
        assert_eq!(text(thread.response("length.php", post("hello")).await).await, "5");
        assert_eq!(text(thread.response("length.php", post(vec![b'x'; 300_000])).await).await, "300000");
        let response = thread.response("moved.php", get()).await;
        assert_eq!(
            (response.status.as_u16(), &response.headers["location"]),
            (302, &"/there".parse().unwrap())
        );
        assert_eq!(thread.response("fails.php", get()).await.status, 500);
        assert_eq!(thread.response("absent.php", get()).await.status, 404);
        assert_eq!(thread.response("absent.php", post(vec![b'x'; 300_000])).await.status, 404);
        let head = thread.response("length.php", request(Method::HEAD, RequestBody::empty())).await;
        assert!(head.body.len().is_none(), "its length is not known");
        assert_eq!(pid(&thread).await, first);
        assert_eq!(thread.running("php").await, 1);
    });
}

#[test]
fn a_worker_is_replaced_after_so_many_requests() {
    let world = world_with(1, EdgeConfig { php_requests: 2, ..EdgeConfig::default() });
    world.run(async |thread| {
        let pids = [pid(&thread).await, pid(&thread).await, pid(&thread).await, pid(&thread).await];
        assert_eq!(pids[0], pids[1]);
        assert_eq!(pids[2], pids[3]);
        assert_ne!(pids[1], pids[2]);
    });
}

#[test]
fn output_streams() {
    let world = world(1);
    world.file(
        "stream.php",
        "<?php ob_end_flush(); echo 'first'; flush(); while (!file_exists('../notes/go')) { usleep(1000); clearstatcache(); }
        for ($i = 0; $i < 300; $i++) echo str_repeat(chr(65 + $i % 26), 10000);",
    );
    let go = world.note("go");
    world.run(async |thread| {
        let mut response = thread.response("stream.php", get()).await;
        assert_eq!(piece(&mut response).await.unwrap().unwrap(), "first");
        std::fs::write(go, "").unwrap();
        let rest = read(&mut response).await.unwrap();
        assert_eq!(rest.len(), 3_000_000);
        assert!(
            rest.chunks(10_000).enumerate().all(|(i, part)| part.iter().all(|&b| b == b'A' + (i % 26) as u8))
        );
        pid(&thread).await;
        assert_eq!(thread.running("php").await, 1);
    });
}

#[test]
fn a_large_body_is_echoed() {
    let world = world(1);
    world.file("echo.php", "<?php ini_set('memory_limit', -1); fpassthru(fopen('php://input', 'r'));");
    let sent: Vec<u8> = (0..5_000_000u32).map(|n| (n >> 3) as u8).collect();
    world.run(async |thread| {
        let first = pid(&thread).await;
        for method in [Method::POST, Method::PUT] {
            // A `PUT` is read only as the script reads it, so that both directions move at once.
            let mut response = thread.response("echo.php", request(method, known(sent.clone()))).await;
            assert!(read(&mut response).await.unwrap() == sent);
        }
        assert_eq!(pid(&thread).await, first);
    });
}

/// A request as FastCGI records, which a visitor could send as the body of a `PUT`.
fn smuggled(file: &str) -> Vec<u8> {
    let mut opening = RequestOpening::new(ConnectionReuse::Kept);
    for (name, value) in [("SCRIPT_FILENAME", file), ("REQUEST_METHOD", "GET"), ("SCRIPT_NAME", "/x")] {
        opening.put(name.as_bytes(), value.as_bytes()).unwrap();
    }
    opening.finish()
}

#[test]
fn a_body_that_a_script_leaves_unread_is_never_a_request() {
    let world = world(1);
    world.file(
        "lazy.php",
        "<?php $f = fopen('php://input', 'r'); stream_set_read_buffer($f, 0); echo strlen(fread($f, 10));",
    );
    world.file("deaf.php", "<?php echo 'deaf';");
    world.file("victim.php", "<?php file_put_contents('../notes/smuggled', 'x'); echo 'smuggled';");
    let victim = world.note("../web/victim.php").to_str().unwrap().to_owned();
    let note = world.note("smuggled");
    world.run(async |thread| {
        for file in ["lazy.php", "deaf.php"] {
            for prefix in ["", "0123456789"] {
                let body = [prefix.as_bytes(), &smuggled(&victim)].concat();
                pid(&thread).await;
                read(&mut thread.response(file, request(Method::PUT, known(body))).await).await.unwrap();
                // Newer PHP reads what a script leaves, and its worker is clean; older PHP leaves it, and its worker is not used
                // again. Whichever it is, the next request would meet what was left.
                pid(&thread).await;
                assert!(!note.exists(), "{file} after {prefix:?}");
            }
        }
        assert!(!note.exists());
    });
}

#[test]
fn a_body_too_large_for_php_spoils_nothing() {
    let world = world(1);
    world.file("post.php", "<?php echo count($_POST);");
    world.run(async |thread| {
        // Above `post_max_size` PHP throws the body away.
        let response = thread.response("post.php", post(vec![b'x'; 9 << 20])).await;
        assert!(text(response).await.ends_with('0'));
        pid(&thread).await;
    });
}

#[test]
fn a_worker_that_dies_breaks_its_answer_off_and_is_replaced() {
    let world = world(1);
    world.file(
        "dies.php",
        "<?php ob_end_flush(); echo 'begun'; flush(); exec('kill -9 ' . getmypid()); sleep(60);",
    );
    let early = "<?php file_put_contents('../notes/runs', 'x', FILE_APPEND); exec('kill -9 ' . getmypid()); sleep(60);";
    world.file("early.php", early);
    let runs = world.note("runs");
    world.run(async |thread| {
        let first = pid(&thread).await;
        let mut response = thread.response("dies.php", get()).await;
        assert_eq!(piece(&mut response).await.unwrap().unwrap(), "begun");
        assert!(matches!(piece(&mut response).await, Some(Err(BodyError::Backend(_)))));
        let second = pid(&thread).await;
        assert_ne!(first, second);

        let refusal = thread.refusal("early.php", get()).await;
        assert!(matches!(refusal, Refusal::BackendInvalid(_)), "{refusal}");
        assert_eq!(std::fs::read(&runs).unwrap().len(), 1, "a script that has begun is not run again");
        assert_ne!(pid(&thread).await, second);
    });
}

/// Each time the very next request meets it, in whatever state its end is.
#[test]
fn an_idle_worker_that_died_is_replaced_unnoticed() {
    let world = world(1);
    world.file("length.php", "<?php echo strlen(file_get_contents('php://input'));");
    world.run(async |thread| {
        for len in [5, 300_000] {
            for method in [Method::POST, Method::PUT] {
                let before = pid(&thread).await;
                signal(before, rustix::process::Signal::KILL);
                let request = request(method.clone(), kept(vec![b'x'; len]).await);
                assert_eq!(text(thread.response("length.php", request).await).await, len.to_string());
                assert_ne!(pid(&thread).await, before);
            }
        }
        let before = pid(&thread).await;
        signal(before, rustix::process::Signal::KILL);
        assert_ne!(pid(&thread).await, before);
    });
}

#[test]
fn a_request_that_no_worker_has_read_gets_another_one() {
    let world = world(1);
    world.file("length.php", "<?php echo strlen(file_get_contents('php://input'));");
    world.run(async |thread| {
        for len in [0, 5, 300_000] {
            let stopped = free_pid(&thread).await;
            signal(stopped, rustix::process::Signal::STOP);
            let request = request(Method::POST, kept(vec![b'x'; len]).await);
            let ask = thread.response("length.php", request);
            // Dead only after the request was sent, and before it was read.
            let kill = async { signal(stopped, rustix::process::Signal::KILL) };
            let (response, ()) = tokio::join!(biased; ask, kill);
            assert_eq!(text(response).await, len.to_string());
            assert_ne!(pid(&thread).await, stopped);
        }
    });
}

/// It may have acted on what it has read, so the request is nobody else's.
#[test]
fn a_request_that_a_worker_has_read_is_not_repeated() {
    let world = world(1);
    world.file(
        "early.php",
        "<?php file_put_contents('../notes/runs', 'x', FILE_APPEND); exec('kill -9 ' . getmypid()); sleep(60);",
    );
    let runs = world.note("runs");
    world.run(async |thread| {
        for (number, method) in [Method::PUT, Method::POST].into_iter().enumerate() {
            let request = request(method.clone(), kept(vec![b'x'; 300_000]).await);
            let refusal = thread.refusal("early.php", request).await;
            assert!(matches!(refusal, Refusal::BackendInvalid(_)), "{method}: {refusal}");
            assert_eq!(std::fs::read(&runs).unwrap().len(), number + 1, "{method}");
        }
    });
}

#[test]
fn a_request_is_given_to_so_many_workers_and_no_more() {
    // Each of them ends at once.
    let world = World::with_php("/bin/true");
    world.file("hello.php", "<?php echo 'hello';");
    world.run(async |thread| {
        let request = request(Method::POST, kept("hello").await);
        let refusal = thread.refusal("hello.php", request).await;
        assert!(matches!(refusal, Refusal::BackendInvalid(_) | Refusal::BackendUnreachable(_)), "{refusal}");
    });
    let started = world.metrics.php_spawned.get();
    assert!((1..=u64::from(WORKERS_PER_REQUEST_MAX)).contains(&started), "{started}");
}

#[test]
fn a_body_never_has_another_length_than_declared() {
    let world = world(1);
    world.file("less.php", "<?php header('Content-Length: 50'); echo 'hello';");
    world.file("more.php", "<?php header('Content-Length: 5'); echo 'hello and more';");
    world.file(
        "lots.php",
        "<?php header('Content-Length: 5'); for ($i = 0; $i < 100; $i++) echo str_repeat('hello', 1000);",
    );
    world.run(async |thread| {
        let first = pid(&thread).await;
        let mut response = thread.response("less.php", get()).await;
        assert_eq!(response.body.len(), Some(50));
        assert_eq!(piece(&mut response).await.unwrap().unwrap(), "hello");
        assert!(matches!(piece(&mut response).await, Some(Err(BodyError::Backend(_)))));
        for file in ["more.php", "lots.php"] {
            let mut response = thread.response(file, get()).await;
            assert_eq!(response.body.len(), Some(5));
            assert_eq!(read(&mut response).await.unwrap(), b"hello", "{file}");
        }
        assert_eq!(pid(&thread).await, first, "the connection to the worker is clean each time");
    });
}

#[test]
fn a_script_may_go_on_after_its_declared_answer() {
    let world = world(1);
    world.file(
        "later.php",
        "<?php ob_end_flush(); header('Content-Length: 5'); echo 'hello'; flush();
        while (!file_exists('../notes/go')) { usleep(1000); clearstatcache(); }
        file_put_contents('../notes/done', getmypid());",
    );
    let (go, done) = (world.note("go"), world.note("done"));
    world.run(async |thread| {
        let first = pid(&thread).await;
        let mut response = thread.response("later.php", get()).await;
        assert_eq!(piece(&mut response).await.unwrap().unwrap(), "hello");
        drop(response);
        std::fs::write(go, "").unwrap();
        assert_eq!(pid(&thread).await, first, "it served the next request once it was done");
        assert_eq!(std::fs::read_to_string(done).unwrap(), first.to_string());
    });
}

/// Otherwise anybody could have workers ended and started as fast as he can hang up.
#[test]
fn a_client_that_leaves_an_ordinary_page_ends_no_worker() {
    let world = world(1);
    world.file("page.php", "<?php file_put_contents('../notes/began', ''); while (!file_exists('../notes/go')) usleep(100); echo 'done';");
    let (began, go) = (world.note("began"), world.note("go"));
    world.run(async |thread| {
        let first = pid(&thread).await;
        tokio::select! {
            _ = thread.ask("page.php", get()) => panic!("it waits for its file"),
            () = until("the script begins", || began.exists()) => {}
        }
        std::fs::write(go, "").unwrap();
        assert_eq!(pid(&thread).await, first, "it served the next request once it was done");
    });
}

#[test]
fn a_client_that_leaves_a_long_run_ends_the_worker() {
    let world = world_lingering(0);
    world.file("endless.php", "<?php while (true) { echo str_repeat('x', 10000); flush(); }");
    world.file("silent.php", "<?php file_put_contents('../notes/started', ''); sleep(1000);");
    let started = world.note("started");
    world.run(async |thread| {
        let first = pid(&thread).await;
        let mut response = thread.response("endless.php", get()).await;
        assert!(piece(&mut response).await.unwrap().is_ok());
        drop(response);
        until("the worker ends", || !is_running(first)).await;
        tokio::select! {
            _ = thread.ask("silent.php", get()) => panic!("it never answers"),
            () = until("the script starts", || started.exists()) => {}
        }
        thread.until_none_runs("php").await;
        pid(&thread).await;
    });
}

#[test]
fn a_script_that_takes_too_long_is_ended() {
    let limits = answering_within(500);
    let world = world_with(1, EdgeConfig { limits, ..EdgeConfig::default() });
    world.file("silent.php", "<?php sleep(1000);");
    world.file("stuck.php", "<?php ob_end_flush(); echo 'hello'; flush(); sleep(1000);");
    world.run(async |thread| {
        assert_eq!(thread.refusal("silent.php", get()).await, Refusal::BackendTimeout);
        let mut response = thread.response("stuck.php", get()).await;
        assert_eq!(piece(&mut response).await.unwrap().unwrap(), "hello");
        assert!(matches!(piece(&mut response).await, Some(Err(BodyError::Backend(_)))));
        thread.until_none_runs("php").await;
    });
}

#[test]
fn an_upload_that_goes_on_is_no_silence() {
    let limits = answering_within(1000);
    let world = world_with(1, EdgeConfig { limits, ..EdgeConfig::default() });
    world.file("length.php", "<?php echo strlen(file_get_contents('php://input'));");
    world.run(async |thread| {
        let (sender, body) = arriving(Some(10));
        let send = async move {
            for _ in 0..10 {
                tokio::time::sleep(Duration::from_millis(150)).await;
                sender.send(Ok(Bytes::from_static(b"x"))).await.unwrap();
            }
        };
        let (response, ()) = tokio::join!(thread.response("length.php", request(Method::POST, body)), send);
        assert_eq!(text(response).await, "10");
    });
}

#[test]
fn a_body_of_another_length_than_announced_ends_the_worker() {
    let world = world(1);
    world.run(async |thread| {
        for (announced, sent) in [(10, "hello"), (3, "hello")] {
            let first = pid(&thread).await;
            let (sender, body) = arriving(Some(announced));
            sender.send(Ok(sent.into())).await.unwrap();
            drop(sender);
            let refusal = thread.refusal("pid.php", request(Method::POST, body)).await;
            assert!(matches!(refusal, Refusal::BadRequest(_)), "{refusal}");
            assert_ne!(pid(&thread).await, first);
        }
    });
}

#[test]
fn requests_share_the_workers_there_may_be() {
    let world = world(2);
    world.file("slow.php", "<?php usleep(20000); echo getmypid();");
    world.run(async |thread| {
        let ask = || thread.get("slow.php");
        let (a, b, c, d, e) = tokio::join!(ask(), ask(), ask(), ask(), ask());
        let pids = std::collections::BTreeSet::from([a, b, c, d, e]);
        assert_eq!(pids.len(), 2, "{pids:?}");
        assert_eq!(thread.running("php").await, 2);
    });
}

#[test]
fn a_worker_moves_to_another_thread() {
    let world = world(1);
    let first = world.run(async |thread| pid(&thread).await);
    // The first thread and its runtime are gone, and with its connection to the keeper its worker.
    let second = world.run(async |thread| pid(&thread).await);
    assert_ne!(first, second);
    world.run(async |thread| {
        let here = free_pid(&thread).await;
        std::thread::scope(|scope| {
            let elsewhere = scope.spawn(|| world.run(async |thread| free_pid(&thread).await));
            assert_eq!(elsewhere.join().unwrap(), here);
        });
        assert_eq!(pid(&thread).await, here, "and back, though that runtime is gone");
    });
}

const BUSY: &str = "<?php $end = hrtime(true) + 5e6; while (hrtime(true) < $end); echo getmypid();";

#[test]
fn each_request_of_a_worker_is_told_what_it_used() {
    let world = world(1);
    world.run(async |thread| {
        let mut seen = Vec::new();
        for _ in 0..3 {
            let execution = thread.confine(Confinement::default(), false);
            seen.push((pid(&thread).await, execution.cell().unwrap()));
            execution.wait_all_reported().await;
            assert!(execution.usage().is_some(), "the keeper says it");
        }
        assert!(seen.iter().all(|first| *first == seen[0]), "one worker in one cell: {seen:?}");
    });
}

#[test]
fn usage_of_an_ended_worker_is_still_reported() {
    let world = world_lingering(0);
    world.file("waits.php", "<?php ob_end_flush(); echo 'first'; flush(); sleep(1000);");
    world.run(async |thread| {
        let execution = thread.confine(Confinement::default(), false);
        let mut response = thread.response("waits.php", get()).await;
        assert_eq!(piece(&mut response).await.unwrap().unwrap(), "first");
        assert!(!execution.is_all_reported());
        drop(response);
        thread.until_none_runs("php").await;
        execution.wait_all_reported().await;
        assert!(execution.usage().is_some());
    });
}

#[test]
fn a_worker_moves_when_its_request_is_confined_otherwise() {
    let world = world(1);
    let limits = cell::LimitSet { cpu: Some(CpuQuota::of_core(900)), ..cell::LimitSet::default() };
    let other = Confinement { limits, ..Confinement::default() };
    world.run(async |thread| {
        let first = pid(&thread).await;
        for confinement in [other.clone(), other, Confinement::default()] {
            let execution = thread.confine(confinement, false);
            assert_eq!(pid(&thread).await, first);
            assert!(execution.cell().is_some());
        }
    });
}

#[test]
fn a_short_script_takes_as_long_as_its_quota_wants() {
    let world = world(1);
    world.file("busy.php", BUSY);
    let limits = cell::LimitSet { cpu: Some(CpuQuota::of_core(100)), ..cell::LimitSet::default() };
    world.run(async |thread| {
        let first = pid(&thread).await;
        let execution = thread.confine(Confinement { limits, ..Confinement::default() }, false);
        let start = std::time::Instant::now();
        assert_eq!(thread.get("busy.php").await, first.to_string());
        assert!(execution.is_all_reported(), "its end waited for what it used");
        let usage = execution.usage().unwrap();
        assert!(start.elapsed() >= Duration::from_micros(usage.cpu_us * 10), "{usage:?}");
    });
}

#[test]
fn a_worker_the_keeper_does_not_know_any_more_is_replaced() {
    let world = world(1);
    world.run(async |thread| {
        let first = pid(&thread).await;
        signal(first, rustix::process::Signal::KILL);
        until("the worker is gone", || !is_running(first)).await;
        let limits = cell::LimitSet { cpu_shares: Some(2), ..cell::LimitSet::default() };
        thread.confine(Confinement { limits, ..Confinement::default() }, false);
        assert_ne!(pid(&thread).await, first);
        assert_eq!(thread.running("php").await, 1);
    });
}
