//! Checks an application's record: the command must fit its listener, paths must be valid, times
//! must be in order.
//!
//! Not here: its cell's limits (`limits`), dependencies on other records (`store::plan`).

use std::path::Path;

use super::{RecordFindings, directory, env, files_of_any_kind, is_variable, trailers};
use crate::record::{
    AFTER_WAKE_SIGNALS, APP_LINGER_SECONDS_MAX, APP_LIST_LEN_MAX, APP_PORT, AfterWake, App, AppDatabase,
    AppListen, AppMachine, AppProtocol, BaseRecord, BodyBuffering, DATABASE_NAME_LEN_MAX, DatabaseKind,
    DatabaseTag, FileRoot, IDLE_SECONDS_MAX, INSTANCES_MAX, IdleSteps, MACHINE_VCPUS_MAX, NetworkEndpoint,
    OutboundRules, QUESTION_LEN_MAX, RELEASE_LEN_MAX, ReadyCheck, START_SECONDS_MAX, STOP_SECONDS_MAX,
};

/// Longest requested path, in bytes.
const URL_LEN_MAX: usize = 1024;

/// Longest tag of an image, bytes (distribution-spec v1.1).
const TAG_LEN_MAX: usize = 128;

pub(super) fn app(app: &App, to: &mut RecordFindings) {
    command(app, to);
    directory("directory", &app.directory, to);
    protocol(app, to);
    env(&app.env, to);
    secrets(app, to);
    to.at_least_one("start_seconds", app.start_seconds);
    to.at_most("start_seconds", app.start_seconds, START_SECONDS_MAX);
    to.at_least_one("timeout_seconds", app.timeout_seconds);
    to.at_most("stop_seconds", app.stop_seconds, STOP_SECONDS_MAX);
    to.at_most("linger_seconds", app.linger_seconds, APP_LINGER_SECONDS_MAX);
    trailers(&app.request_trailers, to);
    if let Some(base) = &app.base {
        absolute("base", base.path(), to);
        if let BaseRecord::Layout { tag: Some(tag), .. } = base
            && !is_tag(tag)
        {
            to.add(
                "base",
                tag,
                format!("is not a tag of an image: 1 to {TAG_LEN_MAX} letters, digits, '.', '_' and '-'"),
            );
        }
    }
    if let Some(machine) = &app.machine {
        own_kernel(app, machine, to);
    }
    short("writable", app.writable.len(), to);
    app.writable.iter().for_each(|path| directory("writable", path, to));
    if let Some(ready) = &app.ready {
        readiness(ready, to);
    }
    if let Some(release) = &app.release {
        name_of_release(release, to);
    }
    short("warm_up", app.warm_up.len(), to);
    app.warm_up.iter().for_each(|path| url("warm_up", path, to));
    short("image_watch", app.image_watch.len(), to);
    app.image_watch.iter().for_each(|path| directory("image_watch", path, to));
    after_wake(app, to);
    idle(&app.idle, to);
    if let Some(min) = app.min.filter(|min| *min > 1) {
        to.add("min", min, "is not possible: use 1 for an instance that always runs, or 0");
    }
    if let Some(max) = app.max.filter(|max| !(1..=INSTANCES_MAX).contains(max)) {
        to.add("max", max, format!("is not possible: between 1 and {INSTANCES_MAX}"));
    }
    if let Some(most) = &app.cpu_max
        && let Err(wrong) = most.cpu()
    {
        to.add("cpu_max", most, wrong);
    }
    if app.outbound == OutboundRules::Host && app.listen == AppListen::Port {
        to.add(
            "listen",
            "port",
            "is not possible with outbound = host, where ports are the node's: use socket or fd",
        );
    }
    outbound(app, to);
    short("databases", app.databases.len(), to);
    for AppDatabase { socket, inside, tag } in &app.databases {
        tag.iter().for_each(|tag| question(tag, to));
        absolute("databases.socket", socket, to);
        inside.iter().for_each(|path| absolute("databases.inside", path, to));
    }
}

fn own_kernel(app: &App, machine: &AppMachine, to: &mut RecordFindings) {
    if let Some(path) = machine.kernel.file() {
        absolute("machine.kernel", path, to);
    }
    if let (Some(memory), Err(wrong)) = (&machine.memory, machine.memory_mib()) {
        to.add("machine.memory", memory, wrong);
    }
    if let Some(count) = machine.vcpus.filter(|count| !(1..=MACHINE_VCPUS_MAX).contains(count)) {
        to.add("machine.vcpus", count, format!("is not possible: between 1 and {MACHINE_VCPUS_MAX}"));
    }
    if app.outbound == OutboundRules::Host {
        let hint =
            "is not possible with a kernel of its own, which has a network of its own: use nat or places";
        to.add("outbound", "host", hint);
    }
    if app.protocol == AppProtocol::FastCgi {
        to.add("protocol", "fastcgi", "is not possible with a kernel of its own: use http");
    }
}

fn question(tag: &DatabaseTag, to: &mut RecordFindings) {
    let DatabaseTag { kind, user, database, ask } = tag;
    if ask.trim().is_empty() || ask.len() > QUESTION_LEN_MAX || ask.contains('\0') {
        let hint = format!("is no question: 1 to {QUESTION_LEN_MAX} bytes, without NUL");
        to.add("databases.tag.ask", ask, hint);
    }
    for (field, name) in [("databases.tag.user", user), ("databases.tag.database", database)] {
        let Some(name) = name else { continue };
        if name.is_empty() || name.len() > DATABASE_NAME_LEN_MAX || name.contains('\0') {
            to.add(field, name, format!("is not possible: 1 to {DATABASE_NAME_LEN_MAX} bytes, without NUL"));
        }
    }
    if *kind == DatabaseKind::Redis && database.as_ref().is_some_and(|number| number.parse::<u16>().is_err())
    {
        let number = database.as_deref().unwrap_or_default();
        to.add("databases.tag.database", number, "is not a number, which databases of Redis have");
    }
}

fn protocol(app: &App, to: &mut RecordFindings) {
    match (app.protocol, &app.files) {
        (AppProtocol::Http, None) => {}
        (AppProtocol::Http, Some(files)) => {
            let hint =
                "has no effect on an application that speaks HTTP: remove it, or use protocol = fastcgi";
            to.add("root", files.root.display(), hint);
        }
        (AppProtocol::FastCgi, None) => {
            to.add("root", "", "is missing: with protocol = fastcgi name the document root of its scripts");
        }
        (AppProtocol::FastCgi, Some(files)) => scripts(app, files, to),
    }
    if app.protocol == AppProtocol::FastCgi && app.request_buffering == BodyBuffering::Off {
        to.add(
            "request_buffering",
            "off",
            "is not possible with protocol = fastcgi, whose scripts need a length",
        );
    }
    if app.protocol == AppProtocol::FastCgi && app.listen == AppListen::Port {
        to.add("listen", "port", "is not possible with protocol = fastcgi: use socket or fd");
    }
}

/// Checks the files of an application that speaks FastCGI.
fn scripts(app: &App, files: &FileRoot, to: &mut RecordFindings) {
    files_of_any_kind(files, to);
    // The application does not see the tenant's home, only these parts of it.
    let mut seen = std::iter::once(&app.directory).chain(&app.writable);
    let is_seen = |path: &Path| path == Path::new(".") || files.root.starts_with(path);
    if files.root.is_relative() && app.directory.is_relative() && !seen.any(|path| is_seen(path)) {
        let hint =
            "is neither below its directory nor below a writable path, so it would not see its scripts";
        to.add("root", files.root.display(), hint);
    }
    if let Some(name) = files.env.keys().next() {
        to.add("files.env", name, "has no effect: set the application's own env");
    }
    if let Some(seconds) = files.timeout_seconds {
        to.add("files.timeout_seconds", seconds, "has no effect: set the application's own timeout_seconds");
    }
    if let Some(seconds) = files.linger_seconds {
        to.add("files.linger_seconds", seconds, "has no effect: set the application's own linger_seconds");
    }
}

fn outbound(app: &App, to: &mut RecordFindings) {
    let OutboundRules::Only(list) = &app.outbound else { return };
    short("outbound", list.len(), to);
    let mut seen = Vec::with_capacity(list.len());
    for text in list {
        match text.parse::<NetworkEndpoint>() {
            Err(why) => to.add("outbound", text, why),
            Ok(endpoint) if seen.contains(&endpoint) => to.add("outbound", text, "is there twice"),
            // Named endpoints listen inside, as the application does.
            Ok(NetworkEndpoint { port: APP_PORT, .. }) if app.listen == AppListen::Port => {
                to.add("outbound", text, "has the port the application is given: use listen = socket or fd")
            }
            Ok(endpoint) => seen.push(endpoint),
        }
    }
}

fn command(app: &App, to: &mut RecordFindings) {
    if app.command.first().is_none_or(String::is_empty) {
        to.add("command", "", "is empty: give the program and its arguments as a list");
    }
    to.list_len("command", app.command.len());
    for word in app.command.iter().filter(|word| word.contains('\0')) {
        to.add("command", word, "contains a NUL byte");
    }
    let (others, instead): (&[&str], _) = match app.listen {
        AppListen::Socket => (&["{port}"], "{socket} in the command, or listen = port"),
        AppListen::Port => (&["{socket}"], "{port} in the command, or listen = socket"),
        AppListen::Fd => (&["{port}", "{socket}"], "descriptor 3, which it gets, or another listen"),
    };
    for word in app.command.iter().filter(|word| others.iter().any(|other| word.contains(other))) {
        to.add("command", word, format!("does not fit its 'listen': use {instead}"));
    }
}

fn secrets(app: &App, to: &mut RecordFindings) {
    short("secrets", app.secrets.len(), to);
    for (name, file) in &app.secrets {
        if !is_variable(name) {
            to.add("secrets", name, "is not a variable name: use letters, digits and '_', no digit first");
        }
        if app.env.contains_key(name) {
            to.add("secrets", name, "is in env too: remove one of them");
        }
        directory(&format!("secrets.{name}"), file, to);
    }
}

fn readiness(ready: &ReadyCheck, to: &mut RecordFindings) {
    url("ready.path", &ready.path, to);
    to.at_least_one("ready.within_seconds", ready.within_seconds);
    if let Some(seconds) = ready.within_seconds.filter(|seconds| *seconds > START_SECONDS_MAX) {
        to.add("ready.within_seconds", seconds, format!("is too long: at most {START_SECONDS_MAX}"));
    }
}

fn after_wake(app: &App, to: &mut RecordFindings) {
    short("after_wake", app.after_wake.len(), to);
    for word in &app.after_wake {
        if word.starts_with('/') {
            url("after_wake", word, to);
        } else if !AFTER_WAKE_SIGNALS.contains(&word.as_str()) {
            let signals = AFTER_WAKE_SIGNALS.join(", ");
            to.add("after_wake", word, format!("is neither a path, like /reload, nor one of {signals}"));
        }
    }
}

fn name_of_release(release: &str, to: &mut RecordFindings) {
    let is_plain = |b: u8| b.is_ascii_graphic();
    if !(1..=RELEASE_LEN_MAX).contains(&release.len()) || !release.bytes().all(is_plain) {
        let hint =
            format!("is not a release name: use 1 to {RELEASE_LEN_MAX} printable ASCII characters, no space");
        to.add("release", release, hint);
    }
}

/// Checks that each step comes no earlier than those above it.
fn idle(idle: &IdleSteps, to: &mut RecordFindings) {
    let IdleSteps { quiet, frozen, reclaimed, image, cold } = *idle;
    let steps = [
        ("idle.quiet", quiet),
        ("idle.frozen", frozen),
        ("idle.reclaimed", reclaimed),
        ("idle.image", image),
        ("idle.cold", cold),
    ];
    let mut before: Option<(&str, u32)> = None;
    for (field, seconds) in steps.into_iter().filter_map(|(field, after)| Some((field, after?))) {
        let AfterWake::Seconds(seconds) = seconds else { continue };
        if seconds > IDLE_SECONDS_MAX {
            to.add(field, seconds, format!("is too long: at most {IDLE_SECONDS_MAX}, or never"));
        }
        if let Some((above, least)) = before
            && seconds < least
        {
            to.add(field, seconds, format!("is sooner than {above} ({least}): use a later time, or never"));
        }
        before = Some((field, seconds));
    }
}

/// Checks that a path can be in the first line of a request.
fn url(field: &str, path: &str, to: &mut RecordFindings) {
    if !path.starts_with('/') || path.len() > URL_LEN_MAX || !path.bytes().all(|b| b.is_ascii_graphic()) {
        to.add(
            field,
            path,
            format!("is not a URL path: begin with '/', printable ASCII, at most {URL_LEN_MAX} bytes"),
        );
    }
}

fn absolute(field: &str, path: &Path, to: &mut RecordFindings) {
    if path.is_relative() && !path.as_os_str().is_empty() {
        to.add(field, path.display(), "is relative: use an absolute path");
    }
    directory(field, path, to);
}

fn is_tag(tag: &str) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-');
    (1..=TAG_LEN_MAX).contains(&tag.len()) && tag.bytes().all(is_plain)
}

fn short(field: &str, len: usize, to: &mut RecordFindings) {
    if len > APP_LIST_LEN_MAX {
        to.add(field, len, format!("entries are too many: at most {APP_LIST_LEN_MAX}"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fields(more: &str) -> Vec<String> {
        let command = if more.contains("\"command\"") { "" } else { r#""command":["x"],"# };
        let record: App =
            serde_json::from_str(&format!(r#"{{{command}"directory":"a",{more}}}"#)).expect(more);
        let mut to = RecordFindings::of_site("s", None);
        app(&record, &mut to);
        to.mistakes.into_iter().map(|mistake| mistake.field).collect()
    }

    #[test]
    fn an_application_in_order_has_no_mistakes() {
        for more in [
            r#""listen":"fd","base":"/srv/base","writable":["media","/srv/shared"],"secrets":{"KEY":"k.txt"}"#,
            r#""ready":{"path":"/up?deep=1","within_seconds":300},"warm_up":["/","/login"],"release":"v1.2+git3""#,
            r#""image_when":"rest","image_watch":["db.sqlite3","/srv/x"],"after_wake":["/reload?now","SIGHUP"]"#,
            r#""idle":{"quiet":0,"frozen":0,"reclaimed":5,"image":"never","cold":31536000},"min":0,"max":2,"cpu_max":"150%""#,
            r#""outbound":["203.0.113.7:443","[2001:db8::1]:443","db.internal:3306"],"listen":"port""#,
            r#""outbound":[]"#,
            r#""protocol":"fastcgi","files":{"root":"a/html","front_controller":"index.php","extensions":[".phtml"]}"#,
            r#""protocol":"fastcgi","files":{"root":"/usr/share/wiki"},"listen":"fd""#,
            r#""outbound":"host","databases":[{"socket":"/run/a.sock","inside":"/tmp/a.sock"}],"min":1"#,
            r#""databases":[{"socket":"/a","tag":{"kind":"redis","database":"15","ask":"GET v"}},{"socket":"/b","tag":{"kind":"mysql","user":"u","database":"d","ask":"SELECT 1"}}]"#,
        ] {
            assert_eq!(fields(more), [""; 0], "{more}");
        }
    }

    #[test]
    fn each_rule_names_its_field() {
        let many = |word: &str| vec![word; APP_LIST_LEN_MAX + 1].join(",");
        for (field, more) in [
            ("command", r#""listen":"port","command":["x","{socket}"]"#.to_owned()),
            ("command", r#""listen":"fd","command":["x","{socket}"]"#.to_owned()),
            ("command", r#""listen":"fd","command":["x","{port}"]"#.to_owned()),
            ("start_seconds", r#""start_seconds":301"#.to_owned()),
            ("stop_seconds", r#""stop_seconds":301"#.to_owned()),
            ("linger_seconds", r#""linger_seconds":86401"#.to_owned()),
            ("base", r#""base":"srv""#.to_owned()),
            ("base", r#""base":"/srv/../x""#.to_owned()),
            ("base", r#""base":"oci:srv/app:1""#.to_owned()),
            ("base", r#""base":"oci:/srv/app:""#.to_owned()),
            ("base", r#""base":"oci:/srv/app:a b""#.to_owned()),
            ("writable", r#""writable":["../x"]"#.to_owned()),
            ("writable", format!(r#""writable":[{}]"#, many(r#""w""#))),
            ("secrets", r#""secrets":{"1A":"k"}"#.to_owned()),
            ("secrets", r#""secrets":{"A":"k"},"env":{"A":"x"}"#.to_owned()),
            ("secrets.A", r#""secrets":{"A":""}"#.to_owned()),
            ("ready.path", r#""ready":{"path":"up"}"#.to_owned()),
            ("ready.path", r#""ready":{"path":"/a b"}"#.to_owned()),
            ("ready.path", r#""ready":{"path":"/\r\nX: y"}"#.to_owned()),
            ("ready.within_seconds", r#""ready":{"path":"/","within_seconds":0}"#.to_owned()),
            ("ready.within_seconds", r#""ready":{"path":"/","within_seconds":301}"#.to_owned()),
            ("listen", r#""listen":"port","outbound":"host""#.to_owned()),
            ("listen", r#""listen":"port","protocol":"fastcgi","files":{"root":"a/html"}"#.to_owned()),
            ("root", r#""protocol":"fastcgi""#.to_owned()),
            ("root", r#""files":{"root":"a"}"#.to_owned()),
            ("root", r#""protocol":"fastcgi","files":{"root":"b"}"#.to_owned()),
            ("deny", r#""protocol":"fastcgi","files":{"root":"a","deny":["x"]}"#.to_owned()),
            ("files.env", r#""protocol":"fastcgi","files":{"root":"a","env":{"A":"b"}}"#.to_owned()),
            (
                "files.timeout_seconds",
                r#""protocol":"fastcgi","files":{"root":"a","timeout_seconds":1}"#.to_owned(),
            ),
            ("outbound", r#""outbound":["db.internal"]"#.to_owned()),
            ("outbound", r#""outbound":["a:1","a:1"]"#.to_owned()),
            ("outbound", r#""outbound":["a:8080"],"listen":"port""#.to_owned()),
            (
                "outbound",
                format!(
                    r#""outbound":[{}]"#,
                    (1..=33).map(|port| format!(r#""a:{port}""#)).collect::<Vec<_>>().join(",")
                ),
            ),
            ("release", r#""release":"""#.to_owned()),
            ("release", r#""release":"a b""#.to_owned()),
            ("image_watch", r#""image_watch":["../x"]"#.to_owned()),
            ("image_watch", format!(r#""image_watch":[{}]"#, many(r#""w""#))),
            ("after_wake", r#""after_wake":["SIGKILL"]"#.to_owned()),
            ("after_wake", r#""after_wake":["reload"]"#.to_owned()),
            ("after_wake", r#""after_wake":["/a b"]"#.to_owned()),
            ("after_wake", format!(r#""after_wake":[{}]"#, many(r#""/""#))),
            ("warm_up", r#""warm_up":["//\n"]"#.to_owned()),
            ("warm_up", format!(r#""warm_up":[{}]"#, many(r#""/""#))),
            ("idle.frozen", r#""idle":{"quiet":9,"frozen":8}"#.to_owned()),
            ("idle.cold", r#""idle":{"quiet":9,"image":"never","cold":8}"#.to_owned()),
            ("idle.image", r#""idle":{"image":31536001}"#.to_owned()),
            ("min", r#""min":2"#.to_owned()),
            ("max", r#""max":0"#.to_owned()),
            ("max", r#""max":17"#.to_owned()),
            ("cpu_max", r#""cpu_max":"2""#.to_owned()),
            ("databases.socket", r#""databases":[{"socket":"run/a"}]"#.to_owned()),
            ("databases.inside", r#""databases":[{"socket":"/run/a","inside":"a"}]"#.to_owned()),
        ] {
            assert_eq!(fields(&more), [field], "{more}");
        }
    }

    #[test]
    fn questions_to_databases_are_bounded() {
        let tagged = |tag: &str| format!(r#""databases":[{{"socket":"/run/a","tag":{{{tag}}}}}]"#);
        for (field, more) in [
            ("databases.tag.ask", tagged(r#""kind":"mysql","ask":" ""#)),
            ("databases.tag.ask", tagged(&format!(r#""kind":"mysql","ask":"{}""#, "x".repeat(1025)))),
            ("databases.tag.user", tagged(r#""kind":"mysql","user":"","ask":"SELECT 1""#)),
            (
                "databases.tag.database",
                tagged(r#""kind":"postgresql","database":"a\u0000b","ask":"SELECT 1""#),
            ),
            ("databases.tag.database", tagged(r#""kind":"redis","database":"blog","ask":"GET a""#)),
        ] {
            assert_eq!(fields(&more), [field], "{more}");
        }
    }
}
