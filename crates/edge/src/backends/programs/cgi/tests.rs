//! Facts about CGI programs, run by a real keeper.

use std::time::Duration;

use http::Method;
use nagaya_records::cell;
use nagaya_records::cell::{Confinement, CpuQuota};

use crate::backends::programs::script::ProgramOutcome;
use crate::backends::programs::testing::{
    World, answering_within, arriving, get, piece, poll_once, post, read, request, text, until,
};
use crate::http::message::{BodyError, RequestBody, ResponseBody};
use crate::http::refusal::Refusal;
use crate::options::EdgeConfig;

fn world() -> World {
    World::new("cgi", "", EdgeConfig::default())
}

/// A node that waits for programs this long, milliseconds.
fn impatient(backend_ms: u64) -> World {
    let limits = answering_within(backend_ms);
    World::new("cgi", "", EdgeConfig { limits, ..EdgeConfig::default() })
}

#[test]
fn a_program_is_told_about_its_request() {
    let world = world();
    let script = "#!/bin/sh\nprintf 'Content-Type: text/plain\\nStatus: 201\\n\\n'\n\
                  echo \"$REQUEST_METHOD $SCRIPT_NAME $PATH_INFO $HTTP_HOST $UNIQUE_ID\"\n";
    world.file("env.cgi", script);
    world.run(async |thread| {
        let response = thread.response("env.cgi//a b/c", get()).await;
        assert_eq!(response.status, 201);
        assert_eq!(response.headers["content-type"], "text/plain");
        assert_eq!(text(response).await, format!("GET /env.cgi /a b/c demo {:032x}\n", 1));
    });
}

#[test]
fn output_may_trickle() {
    let world = world();
    let pieces = ["Conte", "nt-Type: a/b\\r", "\\n\\r", "\\nhel", "lo"];
    let script: String = pieces.map(|piece| format!("printf '{piece}'; sleep 0.02\n")).concat();
    world.file("slow.cgi", &format!("#!/bin/sh\n{script}"));
    world.run(async |thread| assert_eq!(thread.get("slow.cgi").await, "hello"));
}

#[test]
fn output_that_is_no_answer_is_refused() {
    let world = world();
    world.file("nothing.cgi", "#!/bin/sh\n");
    world.file("body.cgi", "#!/bin/sh\necho hello\necho\n");
    world.file("half.cgi", "#!/bin/sh\necho 'X-A: 1'\n");
    world.file(
        "huge.cgi",
        "#!/bin/sh\nwhile :; do echo \"X-A: 0123456789012345678901234567890123456789\"; done\n",
    );
    world.file("nph.cgi", "#!/bin/sh\nprintf 'HTTP/1.1 200 OK\\r\\n\\r\\nhi'\n");
    world.run(async |thread| {
        for (file, why) in [
            ("nothing.cgi", "printed nothing"),
            ("body.cgi", "malformed"),
            ("half.cgi", "ended within its header"),
            ("huge.cgi", "larger than"),
            ("nph.cgi", "malformed"),
        ] {
            match thread.refusal(file, get()).await {
                Refusal::BackendInvalid(text) => assert!(text.contains(why), "{file}: {text}"),
                other => panic!("{file}: {other}"),
            }
        }
        thread.until_none_runs("cgi").await;
    });
}

#[test]
fn a_body_never_has_another_length_than_declared() {
    let world = world();
    world.file("exact.cgi", "#!/bin/sh\nprintf 'Content-Length: 5\\n\\nhello'\n");
    world.file("more.cgi", "#!/bin/sh\nprintf 'Content-Length: 5\\n\\nhello HTTP/1.1 200 OK'\n");
    world.file(
        "late.cgi",
        "#!/bin/sh\nprintf 'Content-Length: 5\\n\\nhel'; sleep 0.02; printf 'lo and more'\n",
    );
    world.file("less.cgi", "#!/bin/sh\nprintf 'Content-Length: 50\\n\\nhello'\n");
    world.run(async |thread| {
        for file in ["exact.cgi", "more.cgi", "late.cgi"] {
            let mut response = thread.response(file, get()).await;
            assert_eq!(response.body.len(), Some(5), "{file}");
            assert_eq!(read(&mut response).await.unwrap(), b"hello", "{file}");
        }
        let mut response = thread.response("less.cgi", get()).await;
        assert_eq!(response.body.len(), Some(50));
        assert_eq!(piece(&mut response).await.unwrap().unwrap(), "hello");
        assert!(matches!(piece(&mut response).await, Some(Err(BodyError::Backend(_)))));
    });
}

#[test]
fn a_program_that_does_not_end_is_ended_with_its_tree() {
    let world = impatient(500);
    world.file("silent.cgi", "#!/bin/sh\nsleep 1000 &\nsleep 1000\n");
    world.file("stuck.cgi", "#!/bin/sh\nprintf 'X-A: 1\\n\\nhello'\nsleep 1000\n");
    world.run(async |thread| {
        assert_eq!(thread.refusal("silent.cgi", get()).await, Refusal::BackendTimeout);
        let mut response = thread.response("stuck.cgi", get()).await;
        assert_eq!(piece(&mut response).await.unwrap().unwrap(), "hello");
        assert!(matches!(piece(&mut response).await, Some(Err(BodyError::Backend(_)))));
        thread.until_none_runs("cgi").await;
    });
}

#[test]
fn the_sites_time_bounds_the_whole_run() {
    let world = World::new("cgi", r#","timeout_seconds":1"#, EdgeConfig::default());
    world.file("chatty.cgi", "#!/bin/sh\necho 'X-A: 1'\necho\nwhile :; do echo tick; sleep 0.05; done\n");
    world.run(async |thread| {
        let mut response = thread.response("chatty.cgi", get()).await;
        assert!(matches!(read(&mut response).await, Err(BodyError::Backend(_))));
        thread.until_none_runs("cgi").await;
    });
}

#[test]
fn a_client_that_leaves_takes_the_program_along() {
    let world = World::new("cgi", r#","linger_seconds":0"#, EdgeConfig::default());
    world.file("endless.cgi", "#!/bin/sh\necho 'X-A: 1'\necho\nsleep 1000 &\nexec cat /dev/zero\n");
    world.file("silent.cgi", "#!/bin/sh\necho started > ../notes/started\nsleep 1000\n");
    let started = world.note("started");
    world.run(async |thread| {
        let mut response = thread.response("endless.cgi", get()).await;
        assert!(piece(&mut response).await.unwrap().is_ok());
        assert_eq!(thread.running("cgi").await, 1);
        drop(response);
        thread.until_none_runs("cgi").await;
        tokio::select! {
            _ = thread.ask("silent.cgi", get()) => panic!("it never answers"),
            () = until("the program starts", || started.exists()) => {}
        }
        thread.until_none_runs("cgi").await;
    });
}

#[test]
fn program_works_on_if_its_client_leaves_during_the_start() {
    let world = world();
    world.file(
        "works.cgi",
        "#!/bin/sh\nuntil [ -e ../notes/go ]; do sleep 0.01; done\necho done > ../notes/done\n",
    );
    world.file("reads.cgi", "#!/bin/sh\ncat > /dev/null\nexec sleep 1000\n");
    let (go, done) = (world.note("go"), world.note("done"));
    world.run(async |thread| {
        // It is asked for, and not answered for.
        poll_once(thread.ask("works.cgi", get())).await;
        let execution = thread.confine(Confinement::default(), false);
        std::fs::write(&go, "").unwrap();
        until("it has done its work", || done.exists()).await;
        thread.until_none_runs("cgi").await;
        // One that waits for its input has nothing to do without it.
        let (_sender, body) = arriving(Some(10));
        poll_once(thread.ask("reads.cgi", request(Method::POST, body))).await;
        thread.until_none_runs("cgi").await;
        assert!(execution.usage().is_none(), "nothing of it was waited for");
    });
}

#[test]
fn input_is_given_while_output_is_taken() {
    let world = world();
    world.file("echo.cgi", "#!/bin/sh\necho 'X-A: 1'\necho\nexec cat\n");
    let sent: Vec<u8> = (0..4_000_000u32).map(|n| n as u8).collect();
    world.run(async |thread| {
        // Far more than the pipes hold: it passes only if both directions move.
        let mut response = thread.response("echo.cgi", post(sent.clone())).await;
        assert!(read(&mut response).await.unwrap() == sent);

        let (sender, body) = arriving(None);
        let mut response = thread.response("echo.cgi", request(Method::POST, body)).await;
        for text in ["first", "second"] {
            sender.send(Ok(text.into())).await.unwrap();
            assert_eq!(piece(&mut response).await.unwrap().unwrap(), text);
        }
        drop(sender);
        assert!(piece(&mut response).await.is_none(), "the end of the body is the end of the input");
    });
}

#[test]
fn input_need_not_be_read() {
    let world = world();
    world.file("deaf.cgi", "#!/bin/sh\nexec <&-\necho 'X-A: 1'\necho\necho done\n");
    world.run(async |thread| {
        let response = thread.response("deaf.cgi", post(vec![b'x'; 4_000_000])).await;
        assert_eq!(text(response).await, "done\n");
    });
}

#[test]
fn a_body_that_breaks_off_ends_the_request() {
    let world = world();
    world.file("echo.cgi", "#!/bin/sh\necho 'X-A: 1'\necho\nexec cat\n");
    world.file("wait.cgi", "#!/bin/sh\ncat > /dev/null\necho 'X-A: 1'\necho\n");
    world.run(async |thread| {
        let (sender, body) = arriving(Some(10));
        sender.send(Err(BodyError::ClientGone)).await.unwrap();
        assert_eq!(thread.refusal("wait.cgi", request(Method::POST, body)).await, Refusal::ClientGone);

        let (sender, body) = arriving(None);
        let mut response = thread.response("echo.cgi", request(Method::POST, body)).await;
        sender.send(Err(BodyError::Malformed("a chunk"))).await.unwrap();
        assert!(matches!(piece(&mut response).await, Some(Err(BodyError::Malformed(_)))));
        drop(response);
        thread.until_none_runs("cgi").await;
    });
}

#[test]
fn answers_without_a_body_have_none() {
    let world = world();
    world.file("hello.cgi", "#!/bin/sh\nprintf 'Content-Length: 5\\n\\nhello'\necho done > ../notes/done\n");
    world.file("none.cgi", "#!/bin/sh\nprintf 'Status: 204\\n\\nhello'\n");
    let done = world.note("done");
    world.run(async |thread| {
        let mut response = thread.response("hello.cgi", request(Method::HEAD, RequestBody::empty())).await;
        assert_eq!(response.body.len(), Some(5), "the length of the body that GET would have");
        assert!(piece(&mut response).await.is_none());
        assert!(done.exists(), "the program was not stopped in the middle");
        let response = thread.response("none.cgi", get()).await;
        assert!(matches!(response.body, ResponseBody::Empty));
        thread.until_none_runs("cgi").await;
    });
}

#[test]
fn a_local_redirect_is_handed_back() {
    let world = world();
    world.file("go.cgi", "#!/bin/sh\nprintf 'Location: /there?x=1\\n\\n'\n");
    world.run(async |thread| match thread.ask("go.cgi", get()).await {
        Ok(ProgramOutcome::LocalRedirect { path, query }) => {
            assert_eq!((path.as_str(), query.as_deref()), ("/there", Some("x=1")));
        }
        _ => panic!("not a local redirect"),
    });
}

#[test]
fn program_that_cannot_start_is_refused() {
    let world = world();
    world.file("broken.cgi", "#!/proc/nonexistent/interpreter\n");
    world.run(async |thread| {
        assert_eq!(thread.refusal("absent.cgi", get()).await, Refusal::NotFound);
        let refusal = thread.refusal("broken.cgi", get()).await;
        assert!(refusal.row().status.is_server_error(), "{refusal}");
    });
}

/// A program that uses some milliseconds of CPU time and then says `fine`.
const BUSY: &str =
    "#!/bin/sh\ni=0; while [ $i -lt 20000 ]; do i=$((i+1)); done; printf 'Content-Type: a/b\\n\\nfine'\n";

fn percent(percent: u32) -> Confinement {
    let limits = cell::LimitSet { cpu: Some(CpuQuota::of_core(percent * 10)), ..cell::LimitSet::default() };
    Confinement { limits, ..Confinement::default() }
}

#[test]
fn limit_slows_a_program_beyond_its_time_without_refusal() {
    let world = impatient(1000);
    // 150 ms of CPU time, however fast the processor is: three seconds at a twentieth of it.
    world.file(
        "busy.cgi",
        "#!/usr/bin/perl\nmy $n; do { $n++ for 1 .. 1000 } while ((times)[0] + (times)[1] < 0.15);\n\
         print \"X-A: 1\\n\\nfine\";\n",
    );
    world.file("silent.cgi", "#!/bin/sh\nexec sleep 1000\n");
    world.run(async |thread| {
        thread.confine(percent(5), false);
        assert_eq!(thread.get("busy.cgi").await, "fine");
        assert_eq!(thread.refusal("silent.cgi", get()).await, Refusal::BackendTimeout, "it does nothing");
        thread.until_none_runs("cgi").await;
    });
}

#[test]
fn usage_of_a_program_is_known_after_its_answer() {
    let world = world();
    world.file("busy.cgi", BUSY);
    world.run(async |thread| {
        let execution = thread.confine(Confinement::default(), false);
        assert_eq!(thread.get("busy.cgi").await, "fine");
        assert!(execution.cell().is_some());
        execution.wait_all_reported().await;
        let usage = execution.usage().expect("the keeper says what it used");
        assert!(usage.cpu_us > 1000, "{usage:?}");
    });
}

#[test]
fn a_short_program_takes_as_long_as_its_quota_wants() {
    let world = world();
    world.file("busy.cgi", BUSY);
    world.run(async |thread| {
        let execution = thread.confine(percent(10), false);
        let start = std::time::Instant::now();
        assert_eq!(thread.get("busy.cgi").await, "fine");
        let took = start.elapsed();
        assert!(execution.is_all_reported(), "its end waited for what it used");
        let usage = execution.usage().unwrap();
        let paid = Duration::from_micros(usage.cpu_us * 10);
        assert!(took >= paid, "{took:?} for {usage:?}");
        assert!(execution.paced_us() + usage.throttled_us > 0);
    });
}

#[test]
fn a_named_cell_pays_for_all_that_ran_in_it() {
    let world = world();
    world.file("busy.cgi", BUSY);
    let limits = cell::LimitSet { cpu: Some(CpuQuota::of_core(200)), ..cell::LimitSet::default() };
    let name = cell::CellName::parse("slow").unwrap();
    let controllers = cell::CgroupController::ALL.to_vec();
    let named = cell::NamedCell { name, scope: cell::CellScope::Tenant, controllers, limits: Some(limits) };
    let confinement = Confinement { named: vec![named], ..Confinement::default() };
    world.run(async |thread| {
        let start = std::time::Instant::now();
        let mut used = 0;
        for _ in 0..3 {
            let execution = thread.confine(confinement.clone(), false);
            assert_eq!(thread.get("busy.cgi").await, "fine");
            used += execution.usage().unwrap().cpu_us;
        }
        assert!(start.elapsed() >= Duration::from_micros(used * 5), "{used} us at 20 percent");
    });
}

#[test]
fn an_answer_that_streams_is_settled_at_its_end() {
    let world = world();
    world.file(
        "stream.cgi",
        &BUSY.replace("fine'", "a'; until [ -e ../notes/go ]; do sleep 0.01; done; printf b"),
    );
    let go = world.note("go");
    world.run(async |thread| {
        let execution = thread.confine(percent(5), false);
        let start = std::time::Instant::now();
        let mut response = thread.response("stream.cgi", get()).await;
        assert_eq!(piece(&mut response).await.unwrap().unwrap(), "a");
        assert!(!execution.is_all_reported(), "the first part did not wait");
        std::fs::write(&go, "").unwrap();
        assert_eq!(text(response).await, "b");
        let usage = execution.usage().unwrap();
        assert!(start.elapsed() >= Duration::from_micros(usage.cpu_us * 20), "{usage:?}");
    });
}

#[test]
fn a_client_that_is_told_gets_the_answer_with_its_figures() {
    let world = world();
    world.file("busy.cgi", &BUSY.replace("fine", "a"));
    world.file(
        "forged.cgi",
        "#!/bin/sh\nprintf 'Content-Type: a/b\\nNagaya-Receipt: cpu=0\\n\\nfine'; sleep 0.02; echo '!'\n",
    );
    world.run(async |thread| {
        for file in ["busy.cgi", "forged.cgi"] {
            let execution = thread.confine(Confinement::default(), true);
            let response = thread.response(file, get()).await;
            assert!(matches!(response.body, ResponseBody::Bytes(_)), "all of it was waited for");
            assert!(execution.usage().is_some());
            assert!(!response.headers.contains_key("nagaya-receipt"));
        }
    });
}
