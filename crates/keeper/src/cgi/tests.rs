//! Names of programs and variables, good and hostile, as tables.
//!
//! Not here: what the kernel makes of them; `tests/kernel.rs` runs real programs.

use super::*;

fn files() -> FileRoot {
    FileRoot { root: "www".into(), front_controller: Some("front.pl".into()), ..FileRoot::default() }
}

#[test]
fn programs_inside_the_root_with_the_right_ending_are_accepted() {
    for good in ["a.cgi", "cgi-bin/a.cgi", "a b/ü.cgi", "..a/b..cgi.cgi", "front.pl", ".cgi"] {
        assert_eq!(check_script(&files(), good), Ok(()), "{good}");
    }
    let own = FileRoot { extensions: vec![".pl".into(), ".py".into()], ..files() };
    assert!(check_script(&own, "x.py").is_ok());
    assert!(check_script(&own, "x.cgi").is_err());
}

#[test]
fn names_that_leave_the_root_or_are_no_programs_are_refused() {
    let long = format!("{}.cgi", "x".repeat(SITE_PATH_LEN_MAX));
    for bad in [
        "",
        "/a.cgi",
        "../a.cgi",
        "x/../../a.cgi",
        "x//a.cgi",
        "./a.cgi",
        "a.cgi/",
        "a.cgi\0",
        "a.cgi\0.txt",
        "a.txt",
        "x/front.pl",
        "a.cgi.bak",
        &long,
    ] {
        let fault = check_script(&files(), bad).unwrap_err();
        assert_eq!((fault.failure, fault.code), (FailureKind::Invalid, fault::SCRIPT_NAME), "{bad}");
        assert!(fault.message.len() < 1000, "{bad}");
    }
}

#[test]
fn an_empty_ending_does_not_make_every_file_a_program() {
    let empty = FileRoot { extensions: vec![String::new()], ..files() };
    assert!(check_script(&empty, "a.txt").is_err());
}

fn build(pairs: &[(&str, &str)]) -> Result<Vec<String>, Fault> {
    let pairs = pairs.iter().map(|(name, value)| ((*name).into(), (*value).into())).collect();
    let site = BTreeMap::from([("MODE".into(), "prod".into()), ("REMOTE_USER".into(), "fixed".into())]);
    let env = environment(pairs, Path::new("/home/a/www/"), "bin/x.cgi", &site)?;
    Ok(env.into_iter().map(|text| text.into_string().unwrap()).collect())
}

#[test]
fn paths_come_from_the_record_and_the_site_has_the_last_word() {
    let env = build(&[
        ("REQUEST_METHOD", "GET"),
        ("HTTP_X_A1", "v=1\r\n"),
        ("PATH_INFO", "/p/../q"),
        ("SCRIPT_FILENAME", "/etc/passwd"),
        ("DOCUMENT_ROOT", "/etc"),
        ("REMOTE_USER", "forged"),
        ("APP_STAGE", "of a rule"),
    ])
    .unwrap();
    for want in [
        "REQUEST_METHOD=GET",
        "HTTP_X_A1=v=1\r\n",
        "PATH=/usr/local/bin:/usr/bin:/bin",
        "DOCUMENT_ROOT=/home/a/www/",
        "SCRIPT_FILENAME=/home/a/www/bin/x.cgi",
        "PATH_TRANSLATED=/home/a/www/p/../q",
        "MODE=prod",
        "REMOTE_USER=fixed",
        "APP_STAGE=of a rule",
    ] {
        assert!(env.iter().any(|have| have == want), "{want} in {env:?}");
    }
    assert!(!env.iter().any(|have| have.contains("/etc")), "{env:?}");
}

#[test]
fn a_proxy_header_never_reaches_a_program() {
    let env = build(&[("HTTP_PROXY", "http://evil")]).unwrap();
    assert!(!env.iter().any(|have| have.contains("evil")), "{env:?}");
}

#[test]
fn variables_that_steer_loaders_and_shells_are_refused() {
    for name in [
        "LD_PRELOAD",
        "PATH",
        "IFS",
        "BASH_ENV",
        "PERL5LIB",
        "PYTHONPATH",
        "RUBYOPT",
        "NODE_OPTIONS",
        "PHPRC",
        "ENV",
        "https_proxy",
        "SERVER_ADMIN",
        "REMOTE_GROUP",
        "ORIG_SCRIPT_NAME",
        "http_host",
        "HTTP_",
        "HTTP_A-B",
        "HTTP_a",
        "HTTP_A=B",
        "",
        "=",
        "A\0",
        "REQUEST_METHOD ",
        "HTTP_Ä",
    ] {
        let fault = build(&[(name, "x")]).unwrap_err();
        assert_eq!((fault.failure, fault.code), (FailureKind::Invalid, fault::ENVIRONMENT), "{name}");
    }
    assert!(build(&[("HTTP_A", "x\0y")]).is_err());
    assert!(build(&[("HTTP_A", "x"), ("HTTP_A", "y")]).is_err());
}

#[test]
fn more_variables_than_a_request_can_have_are_refused() {
    let many = (0..=VARIABLES_MAX).map(|n| (format!("HTTP_X{n}"), String::new())).collect();
    assert!(environment(many, Path::new("/"), "x.cgi", &BTreeMap::new()).is_err());
}
