//! A site that several other nodes have: which of them get its requests, and what is done when one of them does not answer.

use super::*;

/// The site's record allows so many nodes.
fn allow(node: &ThreadContext, max: u32) {
    let demo = format!(
        r#"{{"name":"demo","tenant":"t","hosts":["demo"],"backend":{{"kind":"app","command":["serve"],"directory":"app","max":{max}}}}}"#
    );
    node.shared.apply([RecordChange::PutSite(serde_json::from_str(&demo).unwrap())]).unwrap();
}

/// `b` has it, and `c` as well.
fn both() -> Placement {
    placement("b", 1).with_copy(name("c"), 0, 0)
}

/// So many requests at once, and what each of them was answered.
async fn answers(node: &Rc<ThreadContext>, count: usize) -> Vec<String> {
    let begun: Vec<_> = (0..count)
        .map(|_| {
            let node = Rc::clone(node);
            spawn_local(async move { read(serve(&node, get()).await).await })
        })
        .collect();
    let mut answers = Vec::new();
    for begun in begun {
        let (status, body, _) = begun.await.unwrap();
        answers.push(format!("{} {}", status.as_u16(), String::from_utf8_lossy(&body)));
    }
    answers.sort();
    answers
}

#[test]
fn only_those_that_are_awake_and_allowed_get_requests() {
    run(async {
        let ca = Ca::new();
        let b = Remote::start(ca.options("b", "b"), |_| async { text("b") });
        let c = Remote::start(ca.options("c", "c"), |_| async { text("c") });
        let nodes = [record("b", b.address), record("c", c.address)];
        let (node, asked) = node_a(&ca, &nodes, both());
        allow(&node, 2);
        assert_eq!(answers(&node, 4).await, ["200 b"; 4], "c is not awake yet");
        let ready = both().with_ready(&name("c")).unwrap();
        node.shared.apply([RecordChange::PutPlacement(ready)]).unwrap();
        assert_eq!(answers(&node, 4).await, ["200 b", "200 b", "200 c", "200 c"], "as many each");
        allow(&node, 1);
        assert_eq!(answers(&node, 4).await, ["200 b"; 4], "c has not given it up yet, and gets none");
        assert!(asked.try_recv().is_err());
    });
}

#[test]
fn second_node_replaces_a_silent_one_before_anybody_is_asked() {
    run(async {
        let ca = Ca::new();
        let (listener, probes) = sockets();
        let silent = record("b", listener.local_addr().unwrap());
        let c = Remote::start(ca.options("c", "c"), |_| async { text("c") });
        let ready = both().with_ready(&name("c")).unwrap();
        let (node, asked) = node_a(&ca, &[silent, record("c", c.address)], ready.clone());
        allow(&node, 2);
        assert_eq!(answers(&node, 4).await, ["200 c"; 4], "nobody waits for the supervisor");
        // Meanwhile it is asked to take the silent one out.
        let rest = ready.without(&name("b"), 0, PlacementReason::Silent).unwrap();
        assert_eq!(answer(&node, &asked, rest).await, (Some(3), PlacementReason::Silent));
        assert_eq!(answers(&node, 4).await, ["200 c"; 4]);
        assert!(asked.try_recv().is_err());
        drop((listener, probes));
    });
}
