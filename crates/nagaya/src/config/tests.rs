//! Tests of the configuration: every mistake of a file is found where it stands, every key is readable,
//! and the reference page is what the code says.

use std::path::Path;

use nagaya_rules::{OnError, RuleFile, RulePhase};

use super::mistake::{ConfigMistake, MistakeSeverity};
use super::read::read;
use super::schema::{LISTEN, SECTIONS};
use super::settings::NodeSettings;
use super::value::{ConfigValue, ValueKind};
use super::{dump, reference};

fn mistakes(text: &str) -> Vec<ConfigMistake> {
    read(Path::new("nagaya.toml"), text).1
}

/// `line:column code` of each mistake, in order.
fn places(text: &str) -> Vec<String> {
    mistakes(text).iter().map(|m| format!("{}:{} {}", m.line, m.column, m.code)).collect()
}

#[test]
fn an_empty_file_is_the_default() {
    let (settings, mistakes) = read(Path::new("nagaya.toml"), "");
    assert_eq!(mistakes, []);
    assert_eq!(dump(&settings), dump(&NodeSettings::default()));
}

#[test]
fn the_null_device_is_no_access_log() {
    let of = |path: &str| {
        let (settings, mistakes) = read(Path::new("nagaya.toml"), &format!("[log]\naccess = {path:?}"));
        assert_eq!(mistakes, []);
        (settings.edge_options().log.access, settings.access_log_dir().map(Path::to_owned))
    };
    assert_eq!(of("/dev/null"), (None, None));
    assert_eq!(of("/var/log/a.log"), (Some("/var/log/a.log".into()), Some("/var/log".into())));
}

#[test]
fn all_mistakes_are_reported_at_once_with_their_places() {
    let text = r#"nodee = "a"
runtime_dir = "run"

[[listen]]
address = "0.0.0.0:80"

[[listen]]
address = "0.0.0.0:80"
tsl = true

[[listen]]
tls = false

[edge]
threads = "four"
h2c = 1
drain_timeout = "5s"

[edge.limits]
head_timeout = 10
head_bytes = "1GiB"
body_bytes = "10KB"
[logs]
level = "info"
[tls]
certificates = "/proc/nonexistent/certificates"
"#;
    let found = places(text);
    assert_eq!(
        found,
        [
            "1:1 NGY0103",
            "2:15 NGY0105",
            "8:11 NGY0107",
            "9:1 NGY0103",
            "11:1 NGY0107",
            "15:11 NGY0104",
            "16:7 NGY0104",
            "17:1 NGY0103",
            "20:16 NGY0104",
            "21:14 NGY0105",
            "22:14 NGY0105",
            "23:2 NGY0103",
            "26:16 NGY0106",
        ]
    );
}

#[test]
fn hints_name_what_was_probably_meant() {
    let hint = |text: &str| {
        let found = mistakes(text);
        assert_eq!(found.len(), 1, "{found:?}");
        found[0].hint.clone()
    };
    assert_eq!(hint("nodee = 'a'"), "did you mean 'node'?");
    assert_eq!(hint("[lgo]\n"), "did you mean 'log'?");
    assert_eq!(hint("[edge.limit]\nconnections = 5"), "did you mean 'limits'?");
    assert_eq!(hint("[edge]\ndrain_timeout = '5s'"), "'drain_timeout' belongs in [edge.limits]");
    assert_eq!(
        hint("[edge]\nstate_dir = '/x'"),
        "'state_dir' belongs at the top of the file, before the first section"
    );
    assert_eq!(
        hint("[edge.limits]\nhead_timeout = 10"),
        "a duration needs its unit, in quotes: \"10s\" or \"10ms\""
    );
    assert_eq!(hint("[[listen]]\naddress = ':80'"), "write the address too: \"0.0.0.0:80\" and \"[::]:80\"");
    assert_eq!(
        hint("[[listen]]\naddress = '0.0.0.0:443'\ntls = true"),
        "set certificates in [tls] to the directory that holds them"
    );
    assert_eq!(
        hint("[[listen]]\naddress = '0.0.0.0:80'\nproxy_protocol = true"),
        "name the proxies in proxy_protocol_from here, or in trusted_proxies of [edge]"
    );
    assert_eq!(
        hint("[[listen]]\naddress = '0.0.0.0:80'\nproxy_protocol_from = ['10.0.0.9']"),
        "set proxy_protocol = true, or remove proxy_protocol_from"
    );
    assert_eq!(
        hint("[admin]\noperate = ['0', '@no-such-group-here']"),
        "remove it, create it, or write its number; a group has @ in front"
    );
    assert_eq!(hint("[keeper]\nfence = 'auto'"), "it is now back_end in [cells]");
    assert_eq!(hint("listen = '0.0.0.0:80'"), "write [[listen]] with address = \"0.0.0.0:80\" below it");
    assert_eq!(
        hint("[rules]\nfile = '/a'"),
        "write [[rules]] with file = \"/etc/nagaya/rules/limits.rb\" and phase = \"access_checker\" below it"
    );
    assert_eq!(hint("[[rules]]\nfile = '/a'\nphase = 'acces_checker'"), "did you mean \"access_checker\"?");
    assert_eq!(hint("[[rules]]\nphase = 'fixups'"), "add file = \"/etc/nagaya/rules/limits.rb\"");
    assert_eq!(hint("[rule_limit]\nmemory = '2MiB'"), "did you mean 'rule_limits'?");
    assert_eq!(hint("[log]\nformat = 'jsn'"), "did you mean \"json\"?");
    assert_eq!(hint("[log]\nlevel = 'inf'"), "did you mean \"info\"?");
    assert_eq!(hint("[log]\nlevel = 'nagaya_edge=debug,warm'"), "did you mean \"warn\"?");
    for fine in ["info", "WARN", "nagaya_edge", "info,nagaya_edge=debug", "nagaya_edge=debug, h2=off"] {
        assert_eq!(places(&format!("[log]\nlevel = '{fine}'")), [""; 0], "{fine}");
    }
    assert_eq!(hint("[edge]\nuser = 'no-such-user-here'").split(':').next(), Some("create it"));
}

#[test]
fn rules_are_read_in_order_and_each_once() {
    let text = "[[rules]]\nfile = '/a.rb'\nphase = 'fixups'\ncache = true\n\n\
                [[rules]]\nphase = 'access_checker'\nfile = '/a.rb'\non_error = 'refuse'\n\n\
                [[rules]]\nphase = 'fixups'\nfile = '/a.rb'\n\n\
                [[rules]]\nphase = 'fixups'\nfile = 'relative.rb'\n\n\
                [rule_limits]\ninstructions = 999\nmemory = '2MiB'\n\
                [receipts]\nallow = ['::1']\n";
    let (settings, mistakes) = read(Path::new("nagaya.toml"), text);
    let found: Vec<_> = mistakes.iter().map(|m| format!("{}:{} {}", m.line, m.column, m.what)).collect();
    assert_eq!(
        found,
        [
            "13:8 /a.rb is listed twice for fixups",
            "17:8 rules.file: 'relative.rb' is not an absolute path",
            "20:16 rule_limits.instructions: 999 is out of range",
        ]
    );
    let rules = &settings.edge.rules;
    assert_eq!((rules[0].phase, rules[0].cache), (RulePhase::Fixups, true));
    assert_eq!((rules[1].phase, rules[1].on_error), (RulePhase::AccessChecker, OnError::Refuse));
    assert_eq!(settings.edge.rule_limits.memory, 2 << 20);
    assert_eq!(settings.edge.receipts.allow, ["::1"]);
}

#[test]
fn a_rule_of_the_store_stands_in_the_place_of_a_file() {
    let text = "runtime_dir = '/run/x'\n[[rules]]\nfile = 'store:a.b'\nphase = 'fixups'\n\n\
                [[rules]]\nfile = '/a.rb'\nphase = 'fixups'\n\n\
                [[rules]]\nfile = 'store:../x'\nphase = 'fixups'\n";
    let (settings, mistakes) = read(Path::new("nagaya.toml"), text);
    assert_eq!(mistakes.iter().map(|mistake| mistake.line).collect::<Vec<_>>(), [11], "{mistakes:?}");
    let paths: Vec<_> = settings.edge_options().rules.into_iter().map(|rule| rule.path).collect();
    assert_eq!(paths[..2], [Path::new("/run/x/rules/a.b.rb"), Path::new("/a.rb")]);
    assert!(dump(&settings).contains("file = \"store:a.b\""));
}

#[test]
fn a_rule_that_the_running_node_has_not_got_is_a_warning() {
    let dir = tempfile::tempdir().unwrap();
    let mut settings = NodeSettings { runtime_dir: dir.path().into(), ..NodeSettings::default() };
    let path = "store:a".into();
    let phase = RulePhase::Fixups;
    settings.edge.rules.push(RuleFile { phase, path, cache: false, on_error: OnError::Pass });
    assert_eq!(super::check_rules(&settings).len(), 0, "no node runs");
    std::fs::create_dir(settings.rules_dir()).unwrap();
    let found = super::check_rules(&settings);
    assert_eq!(
        (found[0].severity, found[0].file.as_path()),
        (MistakeSeverity::Warning, Path::new("store:a"))
    );
    std::fs::write(settings.rules_dir().join("a.rb"), "").unwrap();
    assert_eq!(super::check_rules(&settings).len(), 0);
}

#[test]
fn rule_files_are_compiled_when_the_configuration_is_checked() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("good.rb"), "x = 1\n").unwrap();
    std::fs::write(dir.path().join("bad.rb"), "x = 1\nif x ==\nend\n").unwrap();
    let mut settings = NodeSettings::default();
    for name in ["good.rb", "bad.rb", "missing.rb"] {
        let path = dir.path().join(name);
        settings.edge.rules.push(RuleFile {
            phase: RulePhase::AccessChecker,
            path,
            cache: false,
            on_error: OnError::Pass,
        });
    }
    let found = super::check_rules(&settings);
    let places: Vec<_> = found
        .iter()
        .map(|m| (m.file.file_name().unwrap().to_str().unwrap(), m.line, m.code.as_str(), m.severity))
        .collect();
    let expected = [
        ("bad.rb", 3, "NGY0602", MistakeSeverity::Error),
        ("missing.rb", 0, "NGY0601", MistakeSeverity::Warning),
    ];
    assert_eq!(places, expected);
    assert!(found[0].to_string().contains("bad.rb:3: "), "{}", found[0]);
    assert!(found[1].to_string().contains("missing.rb: warning: "), "{}", found[1]);
}

#[test]
fn a_syntax_error_does_not_hide_the_mistakes_after_it() {
    let found = places("runtime_dir = = \"/run\"\nnode = 5\n");
    assert!(found.contains(&"2:8 NGY0104".to_owned()), "{found:?}");
    assert!(found.iter().any(|place| place.starts_with("1:") && place.ends_with("NGY0102")), "{found:?}");
}

#[test]
fn columns_count_characters_and_not_bytes() {
    assert_eq!(places("[log]\n\"ä\" = 1\nlevel = \"ää\" # x\n[\"ö\"] \n")[0], "2:1 NGY0103");
    assert_eq!(places("edge = { \"ö\" = 1, threads = -1 }"), ["1:10 NGY0103", "1:29 NGY0105"]);
}

#[test]
fn every_key_holds_its_range_and_reads_back_what_it_prints() {
    for section in SECTIONS {
        for key in section.keys {
            assert!(key.doc.ends_with('.'), "{}: the reference prints whole sentences", key.name);
            let defaults = NodeSettings::default();
            let values = match key.kind {
                ValueKind::Count { min, max }
                | ValueKind::Size { min, max }
                | ValueKind::Time { min, max } => {
                    vec![ConfigValue::Number(min), ConfigValue::Number(max)]
                }
                ValueKind::Flag => vec![ConfigValue::Flag(true), ConfigValue::Flag(false)],
                ValueKind::Choice(words) => {
                    words.iter().map(|word| ConfigValue::Text((*word).into())).collect()
                }
                ValueKind::Accounts => vec![ConfigValue::Texts(vec!["root".into(), "33".into()])],
                ValueKind::Ports => {
                    vec![ConfigValue::Texts(vec!["1".into(), "65535".into()]), ConfigValue::Texts(Vec::new())]
                }
                ValueKind::Networks => vec![ConfigValue::Texts(vec!["10.0.0.0/8".into(), "::1".into()])],
                ValueKind::Address => {
                    vec![ConfigValue::Text("127.0.0.1:1".into()), ConfigValue::Text("[::1]:65535".into())]
                }
                _ => vec![ConfigValue::Text("/a \"quoted\" path".into())],
            };
            for value in values.into_iter().chain([(key.get)(&defaults)]) {
                if value == ConfigValue::Unset {
                    assert!(
                        !key.unset.is_empty(),
                        "{}: the reference must say what holds while it is unset",
                        key.name
                    );
                    continue;
                }
                let mut settings = NodeSettings::default();
                (key.set)(&mut settings, value.clone());
                assert_eq!((key.get)(&settings), value, "{}", key.name);
            }
        }
    }
}

#[test]
fn the_defaults_pass_their_own_checks() {
    let text = dump(&NodeSettings::default());
    let wrong: Vec<_> = mistakes(&text).into_iter().filter(|m| m.code != "NGY0106").collect();
    assert_eq!(wrong, [], "{text}");
}

#[test]
fn a_dumped_configuration_reads_back_the_same() {
    let text = "node = 'n1'\n[[listen]]\naddress = '127.0.0.1:8080'\nproxy_protocol = true\nproxy_protocol_from = ['10.0.0.9']\n[admin]\nread = ['0', '@0']\n[edge]\nthreads = 3\ntrusted_proxies = ['10.0.0.0/8']\n[edge.limits]\nhead_timeout = '1500ms'\n[log]\naccess = '/var/log/a.log'\naccess_format = 'json'\n[[rules]]\nphase = 'log_transaction'\nfile = '/etc/a.rb'\n";
    let (settings, mistakes) = read(Path::new("nagaya.toml"), text);
    assert_eq!(mistakes, []);
    let (again, mistakes) = read(Path::new("nagaya.toml"), &dump(&settings));
    assert_eq!(mistakes.iter().filter(|m| m.code != "NGY0106").count(), 0);
    assert_eq!(dump(&again), dump(&settings));
    assert_eq!(again.edge.limits.head_ms, 1500);
    assert_eq!(again.edge.rules, settings.edge.rules);
    assert_eq!(again.listen, settings.listen);
    assert_eq!(LISTEN.keys.len(), 4);
}

#[test]
fn the_reference_page_is_what_the_code_says() {
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/configuration.md");
    let stored = std::fs::read_to_string(page).unwrap_or_default();
    assert!(stored == reference(), "docs/configuration.md is out of step: run `./dev docs`");
}
