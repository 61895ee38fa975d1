//! Nodes whose applications rest only when they are told to, and what tests ask of them.
//!
//! Not here: what is tested (`instances`, `fastcgi`, `outbound`).

use nagaya_tests::client::Response;
use nagaya_tests::suite::skip;
use nagaya_tests::wait;
use nagaya_tests::world::{Builder, World};
use serde_json::{Value, json};

/// A node with tenant alice, which tells its clients what waking took.
pub fn builder() -> Builder {
    with_criu(builder_without_criu())
}

/// The same with nothing said of CRIU.
pub fn builder_without_criu() -> Builder {
    World::builder()
        .tenant("alice")
        .set("receipts", "allow = [\"127.0.0.1\"]")
        .set("instances", "quiet_after = \"365d\"\nfrozen_after = \"365d\"\nreclaimed_after = \"365d\"")
        .set("instances", "image_after = \"365d\"\ncold_after = \"365d\"")
}

/// With a CRIU that is not where the node looks for it by itself, if the tests were told of one.
pub fn with_criu(builder: Builder) -> Builder {
    match std::env::var("NAGAYA_CRIU") {
        Ok(criu) => builder.set("instances", &format!("criu = {criu:?}")),
        Err(_) => builder,
    }
}

/// A site of alice's at `NAME.test`, with `more` in its backend.
#[track_caller]
pub fn add_site(world: &World, name: &str, mut backend: Value, more: Value) {
    for (key, value) in more.as_object().expect("an object") {
        backend[key] = value.clone();
    }
    world.import(&[
        json!({ "name": name, "tenant": "alice", "hosts": [format!("{name}.test")], "backend": backend }),
    ]);
}

#[track_caller]
pub fn get(world: &World, name: &str, target: &str) -> Response {
    world.get(&format!("{name}.test"), target)
}

/// Its row of `nagaya instance list`; null where it has none.
#[track_caller]
pub fn listed(world: &World, name: &str) -> Value {
    let all: Value = serde_json::from_str(&world.cli(&["instance", "list", "--json"])).expect("JSON");
    let all = all.as_array().expect("a list").clone();
    all.into_iter().find(|row| row["site"] == name).unwrap_or(Value::Null)
}

/// Lets it rest, once the threads of the edge have left it.
#[track_caller]
pub fn rest(world: &World, name: &str, to: &str) {
    wait::until("it is not in use any more", || {
        world.try_cli(&["instance", "rest", name, "--to", to]).status.success()
    });
}

/// What `nagaya doctor` finds of this.
pub fn check(world: &World, what: &str) -> Value {
    let checks: Value = serde_json::from_str(&world.cli(&["doctor", "--json"])).expect("JSON");
    let rows = checks.as_array().expect("a list of checks");
    rows.iter().find(|row| row["name"] == what).cloned().unwrap_or_else(|| panic!("no {what} in {checks}"))
}

/// Whether `nagaya doctor` finds this in order.
pub fn has(world: &World, what: &str) -> bool {
    check(world, what)["state"] == "ok"
}

/// Waits for the image that is taken after its start; where no image can be taken, the test ends here.
#[track_caller]
pub fn until_image(world: &World, name: &str) {
    if !has(world, "criu") {
        skip("there is no CRIU here that works");
    }
    wait::until("it has an image, or says why not", || {
        let row = listed(world, name);
        assert!(row["note"].is_null(), "{row}");
        row["image"].is_object()
    });
}

/// The parameters of `wake` in a receipt, if it has one.
pub fn wake(answer: &Response) -> Option<String> {
    let receipt = answer.header("nagaya-receipt").expect("this client gets receipts");
    receipt.split(", ").find_map(|item| item.strip_prefix("wake=")).map(str::to_owned)
}

#[track_caller]
pub fn woken_from(answer: &Response) -> String {
    let wake = wake(answer).unwrap_or_else(|| panic!("it waited for no wake: {answer:?}"));
    let from = wake.split(';').find_map(|part| part.strip_prefix("from="));
    from.expect("a wake says where it began").to_owned()
}
