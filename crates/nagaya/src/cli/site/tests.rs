//! The commands as an operator types them, on a store's file where no node runs.
//!
//! Not here: the same through a node (`admin::tests`, and the end-to-end tests of the built binary).

use clap::Parser;
use nagaya_store::{RedbStore, Store};

use super::super::setting;
use super::*;
use crate::config::settings::SystemIds;

#[derive(clap::Parser)]
#[command(no_binary_name = true)]
enum Line {
    #[command(subcommand)]
    Site(SiteArgs),
    #[command(subcommand)]
    Tenant(tenant::TenantArgs),
    #[command(subcommand)]
    Setting(setting::SettingArgs),
}

struct World {
    place: RecordSource,
    _directory: tempfile::TempDir,
}

fn world() -> World {
    let directory = tempfile::tempdir().unwrap();
    let place = RecordSource {
        admin_socket: directory.path().join("admin.sock"),
        store: directory.path().join("store.redb"),
        member: directory.path().join("cluster/member.json"),
        ids: crate::tenant_ids::IdSource::from_base(7000),
    };
    World { place, _directory: directory }
}

impl World {
    fn run(&self, line: &str) -> Result<ExitCode, CliError> {
        self.run_words(&line.split_whitespace().collect::<Vec<_>>())
    }

    fn run_words(&self, words: &[&str]) -> Result<ExitCode, CliError> {
        match Line::try_parse_from(words).expect("a command") {
            Line::Site(command) => run(command, &self.place),
            Line::Tenant(command) => tenant::run(command, &self.place),
            Line::Setting(command) => setting::run(command, &self.place),
        }
    }

    fn ok(&self, line: &str) {
        self.run(line).expect(line);
    }

    fn refused(&self, line: &str) -> String {
        let error = self.run(line).expect_err(line);
        format!("{}: {error}", error.code().unwrap_or_default())
    }

    fn site(&self, name: &str) -> Value {
        json!(RedbStore::open(&self.place.store).unwrap().site(name).unwrap())
    }

    fn tenant(&self, name: &str) -> Value {
        json!(RedbStore::open(&self.place.store).unwrap().tenant(name).unwrap())
    }

    fn setting(&self, key: &str) -> Value {
        json!(RedbStore::open(&self.place.store).unwrap().setting(key).unwrap())
    }
}

#[test]
fn options_become_the_record_and_set_changes_only_what_it_names() {
    let world = world();
    world.ok("tenant add t --max-concurrent 4");
    world.ok(
        "site add wiki --tenant t --host wiki.test --host *.wiki.test --backend php --root /srv/wiki --index doku.php \
         --deny /data --deny /conf --env A=b=c --error-document 404=e.html --listing --max-concurrent 9 --path /w \
         --stream-seconds 30 --visit-seconds 60",
    );
    let mut expected = json!({
        "name": "wiki", "tenant": "t", "hosts": ["wiki.test", "*.wiki.test"], "path": "/w", "max_concurrent": 9,
        "stream_seconds": 30, "admission": { "visit_seconds": 60 },
        "backend": {
            "kind": "php", "root": "/srv/wiki", "index": ["doku.php"], "listing": true,
            "error_documents": {"404": "e.html"}, "deny": ["/data", "/conf"], "env": {"A": "b=c"},
        },
    });
    assert_eq!(world.site("wiki"), expected);
    world.ok(
        "site set wiki --deny /x --unset index --unset env --unset path --backend static --listing false",
    );
    let backend = expected["backend"].as_object_mut().unwrap();
    for key in ["index", "env", "listing"] {
        backend.remove(key);
    }
    backend.insert("kind".into(), "static".into());
    backend.insert("deny".into(), json!(["/x"]));
    expected.as_object_mut().unwrap().remove("path");
    assert_eq!(world.site("wiki"), expected);
    world.ok("site set wiki --backend app --command puma --command -C --command x.rb --directory /srv --listen port");
    let backend =
        json!({"kind": "app", "command": ["puma", "-C", "x.rb"], "directory": "/srv", "listen": "port"});
    assert_eq!(world.site("wiki")["backend"], backend);
    world.ok("site remove wiki");
    assert_eq!(world.site("wiki"), Value::Null);
}

#[test]
fn a_tenant_gets_the_next_uid_unless_one_is_given() {
    let world = world();
    world.ok("tenant add a");
    world.ok("tenant add b --uid 7001 --gid 5000");
    world.ok("tenant add c");
    let store = RedbStore::open(&world.place.store).unwrap();
    let ids: Vec<_> = store.tenants(None, 0).unwrap().iter().map(|tenant| (tenant.uid, tenant.gid)).collect();
    assert_eq!(ids, [(7000, 7000), (7001, 5000), (7002, 7002)]);
}

#[test]
fn a_removed_uid_is_never_given_again_here_or_after_import() {
    let (world, other) = (world(), world());
    world.ok("tenant add a");
    world.ok("tenant add chosen --uid 7100");
    world.ok("tenant remove a");
    world.ok("tenant remove chosen");
    world.ok("tenant add b");
    assert_eq!(world.tenant("b")["uid"], 7101);
    world.ok("tenant remove b");
    let file = world.place.store.with_extension("jsonl");
    world.ok(&format!("tenant export -o {}", file.display()));
    other.ok(&format!("tenant import {}", file.display()));
    other.ok("tenant add c");
    assert_eq!(other.tenant("c")["uid"], 7102);
}

#[test]
fn ids_of_the_system_are_refused_however_they_come() {
    let world = world();
    let settings = crate::config::NodeSettings {
        system_ids: SystemIds { users: vec!["33".into()], groups: vec!["33".into()] },
        ..crate::config::NodeSettings::default()
    };
    let told = world.refused("tenant add t --uid 999");
    assert!(told.starts_with("NGY0210: tenant 't': uid: '999' is a user of the system"), "{told}");
    let told = world.refused("tenant add t --uid 33 --gid 33");
    assert!(told.contains("uid: '33'") && told.contains("gid: '33'"), "{told}");
    assert!(world.refused("tenant add t --gid 6").contains("gid: '6' is a group of the system"));
    let file = world.place.store.with_extension("jsonl");
    let line = |gid: u32| format!("{{\"tenant\":{{\"name\":\"t\",\"uid\":9000,\"gid\":{gid}}}}}\n");
    std::fs::write(&file, line(42)).unwrap();
    let told = world.refused(&format!("tenant import {}", file.display()));
    assert!(told.contains("line 1: tenant 't': gid: '42' is a group of the system"), "{told}");
    // As root's own configuration allows it.
    world.place.ids.reload(&settings);
    world.ok("tenant add t --uid 33 --gid 33");
    assert!(world.refused("tenant set t --gid 6").contains("gid: '6'"));
}

#[test]
fn refusals_have_a_code_and_say_what_to_do() {
    let world = world();
    assert!(world.refused("site list").starts_with("NGY0221: there is no store"));
    world.ok("tenant add t");
    for (line, expected) in [
        ("tenant add t", "NGY0215: tenant 't' exists already"),
        ("tenant add z --uid 0", "NGY0210: tenant 'z': uid: '0' is root's"),
        ("tenant show nobody", "NGY0211: there is no tenant 'nobody'"),
        ("tenant set nobody --uid 4", "NGY0211: there is no tenant 'nobody'"),
        ("site remove nothing", "NGY0211: there is no site 'nothing'"),
        (
            "site add s --tenant u --host s --backend static --root /s",
            "NGY0210: site 's': tenant: 'u' does not",
        ),
        ("site add s --tenant t --host s --backend static --root s", "NGY0210: site 's': root: is relative"),
        (
            "site add s --tenant t --host a_b! --backend static --root /s",
            "NGY0220: 'a_b!' is not a host name",
        ),
        ("site add s --tenant t --host s --backend http --root /s", "NGY0220: unknown field `root`"),
        ("site add ../s --tenant t --host s --backend static --root /s", "NGY0220: '../s' is not a name"),
        ("site add s --tenant t --backend static --root /s", ": a site needs --host"),
    ] {
        let told = world.refused(line);
        assert!(told.starts_with(expected), "{line}: {told}");
    }
}

#[test]
fn an_export_can_be_imported_elsewhere() {
    let (world, other) = (world(), world());
    world.ok("tenant add t");
    world.ok("site add s --tenant t --host s.test --backend static --root /s");
    let file = world.place.store.with_extension("jsonl");
    world.ok(&format!("site export -o {}", file.display()));
    other.ok("tenant add gone");
    other.ok(&format!("tenant import {} --replace", file.display()));
    assert_eq!(other.site("s"), world.site("s"));
    assert_eq!(RedbStore::open(&other.place.store).unwrap().tenant("gone").unwrap(), None);
    std::fs::write(&file, "{}\n").unwrap();
    assert!(
        other.refused(&format!("site import {}", file.display())).starts_with("NGY0212: nothing was changed")
    );
}

#[test]
fn a_store_that_is_open_elsewhere_is_said_to_be() {
    let world = world();
    let _open = RedbStore::open(&world.place.store).unwrap();
    let told = world.refused("site list");
    assert!(told.starts_with("NGY0202:") && told.contains("no node answers"), "{told}");
}

#[test]
fn with_json_an_error_is_reported_and_the_exit_code_stays() {
    let world = world();
    world.ok("tenant add t");
    assert_eq!(world.run("tenant show nobody --json").unwrap(), ExitCode::from(1));
    assert_eq!(world.run("site add s --json").unwrap(), ExitCode::from(2));
}

#[test]
fn limits_of_a_tenant_are_set_one_by_one_and_taken_out_again() {
    let world = world();
    world.ok(
        "tenant add t --cpu 50% --cpu-shares 512 --read 5M --write 1000 --read-iops 100 --write-iops unlimited \
         --processes 64 --memory 512M --device 8:0:read=30M --device 8:0:write-iops=5",
    );
    let mut expected = json!({
        "cpu": "50%", "cpu_shares": 512, "read": "5M", "write": 1000, "read_iops": 100, "write_iops": "unlimited",
        "processes": 64, "memory": "512M", "devices": {"8:0": {"read": "30M", "write_iops": 5}},
    });
    assert_eq!(world.tenant("t")["limits"], expected);
    world.ok("tenant set t --cpu 75% --unset memory --unset device --unset read-iops");
    let limits = expected.as_object_mut().unwrap();
    for key in ["memory", "devices", "read_iops"] {
        limits.remove(key);
    }
    limits.insert("cpu".into(), "75%".into());
    assert_eq!(world.tenant("t")["limits"], expected);
    world.ok("tenant set t --unset limits");
    assert_eq!(world.tenant("t").get("limits"), None);
    assert_eq!(world.refused("tenant set t --unset limits"), ": there is no limits to unset");
}

#[test]
fn limits_of_a_site_and_of_its_requests_stand_apart() {
    let world = world();
    world.ok("tenant add t");
    world.ok(
        "site add s --tenant t --host s --backend cgi --root /s --cpu 150% --request-cpu 20% --request-processes 8 \
         --request-device 8:0:read=1M --demote 500ms:cpu=10%,cpu-shares=64 --demote 2s:cpu=1%",
    );
    let site = world.site("s");
    assert_eq!(site["limits"], json!({"cpu": "150%"}));
    let request = json!({"cpu": "20%", "processes": 8, "devices": {"8:0": {"read": "1M"}}});
    assert_eq!(site["request_limits"], request);
    let steps = json!([
        {"after_cpu": "500ms", "limits": {"cpu": "10%", "cpu_shares": 64}},
        {"after_cpu": "2s", "limits": {"cpu": "1%"}},
    ]);
    assert_eq!(site["demotions"], steps);
    world.ok("site set s --demote 1s:cpu=5% --unset request-cpu --unset limits");
    let site = world.site("s");
    assert_eq!(site["demotions"].as_array().unwrap().len(), 1);
    assert_eq!((site.get("limits"), site["request_limits"].get("cpu")), (None, None));
    world.ok("site set s --unset demote --unset request-limits");
    let site = world.site("s");
    assert_eq!((site.get("demotions"), site.get("request_limits")), (None, None));
}

#[test]
fn every_wrong_limit_is_told() {
    let world = world();
    world.ok("tenant add t");
    let told = world.refused("tenant set t --cpu half --cpu-shares 1 --memory 1K --device sda:read=5M");
    for part in [
        "NGY0210: tenant 't': limits.cpu: 'half' is not a share of CPU time: write a percentage",
        "tenant 't': limits.cpu_shares: '1' is out of range: 2 to 10000",
        "tenant 't': limits.memory: '1K' is too little",
        "tenant 't': limits.devices: 'sda' is not a device",
    ] {
        assert!(told.contains(part), "{part} is missing in {told}");
    }
    let told = world.refused("site add s --tenant t --host s --backend static --root /s --request-cpu 5%");
    assert!(
        told.contains("request_limits.cpu: has no effect on a static site: only read and write"),
        "{told}"
    );
    for line in
        ["tenant set t --device 8:0=5M", "tenant set t --device 8:0:read", "site set s --demote 5s:cpu"]
    {
        assert!(Line::try_parse_from(line.split_whitespace()).is_err(), "{line}");
    }
    assert!(
        world.refused("site add x --tenant t --host x --backend cgi --root /s --demote 5s:a=1").contains('a')
    );
}

#[test]
fn settings_are_set_listed_and_deleted() {
    let world = world();
    world.ok("setting set www.example.org 20%");
    world.ok(r#"setting set a/b?c&d%20 --json {"cpu":50,"on":true,"who":"x"}"#);
    assert_eq!(world.setting("www.example.org"), json!({"key": "www.example.org", "value": "20%"}));
    let object = json!({"key": "a/b?c&d%20", "value": {"cpu": 50, "on": true, "who": "x"}});
    assert_eq!(world.setting("a/b?c&d%20"), object);
    world.ok("setting set www.example.org -5");
    assert_eq!(world.setting("www.example.org")["value"], "-5");
    for line in ["get www.example.org", "show www.example.org --json", "list", "list --after a --json"] {
        world.ok(&format!("setting {line}"));
    }
    world.ok("setting delete a/b?c&d%20");
    assert_eq!(world.setting("a/b?c&d%20"), Value::Null);
    for (line, expected) in [
        ("setting delete gone", "NGY0211: there is no setting 'gone'"),
        ("setting get gone", "NGY0211: there is no setting 'gone'"),
        ("setting set k --json {\"a\":[1]}", "NGY0220: a value is a text, or an object"),
        ("setting set k --json {", ": --json is not JSON"),
    ] {
        let told = world.refused(line);
        assert!(told.starts_with(expected), "{line}: {told}");
    }
    assert!(
        world
            .refused(&format!("setting set k {}", "x".repeat(5000)))
            .starts_with("NGY0210: setting 'k': value")
    );
    for line in ["setting set k", "setting set k v --json {}"] {
        assert!(Line::try_parse_from(line.split_whitespace()).is_err(), "{line}");
    }
}

#[test]
fn an_applications_settings_are_set_and_mistakes_listed() {
    let world = world();
    world.ok("tenant add demo --home /srv/demo");
    world.ok(
        "site add wiki --tenant demo --host wiki --backend app --directory wiki --command puma --listen fd \
         --secret KEY=key.txt --base /srv/base --writable wiki/files --writable wiki/log --ready /up \
         --ready-within-seconds 5 --release r1 --image-when rest --image-watch db.sqlite3 --after-wake /reload --after-wake SIGHUP --warm-up / --warm-up /login --idle frozen=30 --idle image=never --min 1 \
         --outbound host --database /run/mysqld/mysqld.sock --database /run/pg.sock=/tmp/pg.sock",
    );
    let expected = json!({
        "kind": "app", "command": ["puma"], "directory": "wiki", "listen": "fd", "secrets": {"KEY": "key.txt"},
        "base": "/srv/base", "writable": ["wiki/files", "wiki/log"], "ready": {"path": "/up", "within_seconds": 5},
        "release": "r1", "image_when": "rest", "image_watch": ["db.sqlite3"], "after_wake": ["/reload", "SIGHUP"],
        "warm_up": ["/", "/login"], "idle": {"frozen": 30, "image": "never"}, "min": 1, "outbound": "host",
        "databases": [{"socket": "/run/mysqld/mysqld.sock"}, {"socket": "/run/pg.sock", "inside": "/tmp/pg.sock"}],
    });
    assert_eq!(world.site("wiki")["backend"], expected);
    world.ok("site set wiki --release r2 --idle reclaimed=60 --ready /health --unset secret --unset database --unset min");
    let backend = &world.site("wiki")["backend"];
    assert_eq!(backend["idle"], json!({"frozen": 30, "reclaimed": 60, "image": "never"}));
    assert_eq!(backend["ready"], json!({"path": "/health", "within_seconds": 5}));
    assert_eq!((backend.get("secrets"), backend.get("databases"), backend.get("min")), (None, None, None));
    let error = world
        .run("site set wiki --max 17 --base rel --warm-up x --idle quiet=99")
        .expect_err("four mistakes");
    let CliError::Refused(problem) = error else { panic!("{error}") };
    let fields: Vec<_> = problem.mistakes.iter().map(|mistake| &*mistake.field).collect();
    assert_eq!(fields, ["base", "warm_up", "idle.frozen", "max"]);
    for line in ["site set wiki --idle image", "site set wiki --idle image=soon", "site set wiki --secret x"]
    {
        assert!(Line::try_parse_from(line.split_whitespace()).is_err(), "{line}");
    }
}

#[test]
fn an_application_that_speaks_fastcgi_has_files() {
    let world = world();
    world.ok("tenant add demo --home /srv/demo");
    world.ok(
        "site add wp --tenant demo --host wp --backend app --directory wp --command php-fpm --protocol fastcgi \
         --root wp/html --front-controller index.php --deny /private",
    );
    let expected = json!({
        "kind": "app", "command": ["php-fpm"], "directory": "wp", "listen": "socket", "protocol": "fastcgi",
        "files": {"root": "wp/html", "deny": ["/private"], "front_controller": "index.php"},
    });
    assert_eq!(world.site("wp")["backend"], expected);
    world.ok("site set wp --cache-control max-age=60 --links none --unset deny --unset front-controller");
    let files = &world.site("wp")["backend"]["files"];
    assert_eq!(*files, json!({"root": "wp/html", "cache_control": "max-age=60", "links": "none"}));
    world.ok("site set wp --links own");
    assert_eq!(world.site("wp")["backend"]["files"].get("links"), None);
    let told = world.refused("site set wp --protocol http --listen port");
    assert!(told.contains("root: 'wp/html' has no effect"), "{told}");
    let told = world.refused("site set wp --listen port");
    assert!(told.contains("listen: 'port' is not possible with protocol = fastcgi"), "{told}");
    world.ok("site set wp --protocol http --unset files");
}

#[test]
fn a_question_whose_answer_ends_an_image_belongs_to_a_database() {
    let world = world();
    world.ok("tenant add t --home /srv/t");
    world.ok("site add blog --tenant t --host b.test --backend app --directory blog --command x --database /run/a.sock=/tmp/a.sock");
    let add = |question: &str| world.run_words(&["site", "set", "blog", "--image-tag", question]);
    add("mysql /run/a.sock me@blog  SELECT  v FROM s ").unwrap();
    add("redis /run/b.sock - GET v").unwrap();
    let expected = json!([
        {"socket": "/run/a.sock", "inside": "/tmp/a.sock",
         "tag": {"kind": "mysql", "user": "me", "database": "blog", "ask": "SELECT  v FROM s"}},
        {"socket": "/run/b.sock", "tag": {"kind": "redis", "ask": "GET v"}},
    ]);
    assert_eq!(world.site("blog")["backend"]["databases"], expected);
    assert!(add("oracle /run/a.sock - SELECT 1").is_err());
    for short in ["mysql", "mysql /run/a.sock", "mysql /run/a.sock blog"] {
        assert!(Line::try_parse_from(["site", "set", "blog", "--image-tag", short]).is_err(), "{short}");
    }
    world.ok("site set blog --unset image-tag");
    let expected = json!([{"socket": "/run/a.sock", "inside": "/tmp/a.sock"}, {"socket": "/run/b.sock"}]);
    assert_eq!(world.site("blog")["backend"]["databases"], expected);
    assert!(world.run("site set blog --unset image-tag").is_err());
}

#[test]
fn words_of_a_command_are_written_behind_two_dashes() {
    let world = world();
    world.ok("tenant add t --home /srv/t");
    world.ok("site add blog --tenant t --host b.test --backend app --directory blog -- gunicorn --bind unix:{socket} blog:app");
    let words = json!(["gunicorn", "--bind", "unix:{socket}", "blog:app"]);
    assert_eq!(world.site("blog")["backend"]["command"], words);
    world.ok("site set blog -- node server.js");
    assert_eq!(world.site("blog")["backend"]["command"], json!(["node", "server.js"]));
}

#[test]
fn one_word_with_spaces_is_no_command() {
    let add = |word: &str| {
        let world = world();
        world.ok("tenant add t --home /srv/t");
        let line = [
            "site",
            "add",
            "s",
            "--tenant",
            "t",
            "--host",
            "a.test",
            "--backend",
            "app",
            "--directory",
            "d",
            "--command",
            word,
        ];
        match Line::try_parse_from(line).expect("it parses") {
            Line::Site(command) => run(command, &world.place).map_err(|error| error.to_string()),
            _ => panic!("a command about sites"),
        }
    };
    let refused = add("node server.js --x").expect_err("no shell splits it");
    assert!(refused.contains("behind '--'") && refused.ends_with(": -- node server.js --x"), "{refused}");
    assert!(add("node").is_ok());
    let directory = tempfile::tempdir().unwrap();
    let program = directory.path().join("my program");
    std::fs::write(&program, "").unwrap();
    assert!(add(program.to_str().unwrap()).is_ok(), "a program may have such a name");
}

#[test]
fn a_host_in_other_letters_is_told_how_dns_writes_it() {
    let world = world();
    world.ok("tenant add t --home /srv/t");
    let said = world.refused("site add s --tenant t --host b\u{fc}cher.example --backend static --root s");
    assert!(said.contains("in DNS this name is xn--bcher-kva.example: write it so"), "{said}");
}
