//! Regular expressions as rules write them.

use super::translate;
use crate::testing::{TestRules, evaluate, written};

#[track_caller]
fn shows(source: &str, expected: &str) {
    assert_eq!(written(&format!("Apache.rputs(({source}).inspect)")), expected, "{source}");
}

#[test]
fn ruby_writes_some_things_in_another_way() {
    for (ruby, rust) in [
        (r"\A/api/\h+\z", r"\A/api/[0-9a-fA-F]+\z"),
        (r"[\h-]+", "[0-9a-fA-F-]+"),
        (r"a\Z", r"a(?:\n?\z)"),
        ("(?m:.)(?mi-x)(?<m>m)", "(?s:.)(?si-x)(?<m>m)"),
        (r"(a)(?<n>b(c))\(", r"(?:a)(?<n>b(?:c))\("),
        (r"\\h", r"\\h"),
        ("[(?m:]", "[(?m:]"),
        ("é\\", "é\\"),
    ] {
        assert_eq!(translate(ruby), rust);
    }
}

#[test]
fn literals_are_found_where_ruby_finds_them() {
    for (source, expected) in [
        ("'/wiki/a.cgi' =~ /\\.cgi\\z/", "7"),
        ("/b/ =~ 'éb'", "1"),
        ("/x/ =~ 'éb'", "nil"),
        ("/x/ =~ nil", "nil"),
        ("'a' !~ /b/", "true"),
        ("/ABC/i.match?('xabcx')", "true"),
        ("/a.b/.match?(\"a\\nb\")", "false"),
        ("/a.b/m.match?(\"a\\nb\")", "true"),
        ("/a b/x.match?('ab')", "true"),
        ("/^b$/.match?(\"a\\nb\\nc\")", "true"),
        ("%r{^/(admin|wp-login)}.match?('/wp-login.php')", "true"),
        ("/é+/ =~ 'aéé'", "1"),
        ("Regexp.new('a', Regexp::IGNORECASE).match?('A')", "true"),
        ("Regexp.union('a.b', /c+/).match?('xcc')", "true"),
        ("Regexp.escape('a.b')", "\"a\\\\.b\""),
        ("/a/ == /a/", "true"),
        ("/a/.equal?(/a/)", "true"),
        ("(1..3).map { |n| /#{n}/ =~ '123' }", "[0, 1, 2]"),
    ] {
        shows(source, expected);
    }
}

#[test]
fn case_and_last_match_work() {
    let source = "
        found = case '/api/v2/users'
                when /^\\/static/ then 'static'
                when %r{^/api/v(\\d+)/(?<what>\\w+)} then $1.inspect + $2.inspect + $~[0]
                end
        'none' =~ /(x)/
        Apache.rputs [found, $~, $1, $2, :sym =~ /y/, (/s/ === :sym)].inspect
    ";
    assert_eq!(written(source), r#"["\"users\"nil/api/v2/users", nil, nil, nil, 1, true]"#);
}

#[test]
fn a_match_tells_its_parts() {
    let source = "'aéb-12;x'.match(/(?<word>\\p{L}+)-(?<number>\\d+)(?<no>z)?/)";
    for (call, expected) in [
        ("[0]", "\"aéb-12\""),
        ("[:word]", "\"aéb\""),
        ("['number']", "\"12\""),
        ("[-1]", "nil"),
        ("[9]", "nil"),
        (".captures", "[\"aéb\", \"12\", nil]"),
        (".named_captures", "{\"word\" => \"aéb\", \"number\" => \"12\", \"no\" => nil}"),
        (".pre_match", "\"\""),
        (".post_match", "\";x\""),
        (".begin(2)", "4"),
        (".end(0)", "6"),
        (".values_at(1, 2)", "[\"aéb\", \"12\"]"),
    ] {
        shows(&format!("{source}{call}"), expected);
    }
}

#[test]
fn strings_know_patterns() {
    for (source, expected) in [
        ("'a1b22'.gsub(/\\d+/, '<\\0>')", "\"a<1>b<22>\""),
        ("'John Smith'.sub(/(?<f>\\w+) (\\w+)/, '\\k<f>!')", "\"John!\""),
        ("'a1b2'.gsub(/\\d/) { |d| (d.to_i * 2).to_s }", "\"a2b4\""),
        ("'ab'.gsub(/[ab]/, 'a' => '1', 'b' => '2')", "\"12\""),
        ("'a.b'.gsub('.', '-')", "\"a-b\""),
        ("'abc'.gsub(/x*/, '-')", "\"-a-b-c-\""),
        ("'x=1&y=2'.scan(/(\\w)=(\\d)/)", "[[\"x\", \"1\"], [\"y\", \"2\"]]"),
        ("'a, b;c'.split(/[,;]\\s*/)", "[\"a\", \"b\", \"c\"]"),
        ("'a,b,,'.split(/,/)", "[\"a\", \"b\"]"),
        ("'a,b,c'.split(/,/, 2)", "[\"a\", \"b,c\"]"),
        ("'abc'.split(//)", "[\"a\", \"b\", \"c\"]"),
        ("'a b'.split", "[\"a\", \"b\"]"),
        ("'éab1'.index(/\\d/, 2)", "3"),
        ("'v12'[/\\d+/]", "\"12\""),
        ("'v12'[/v(\\d)/, 1]", "\"1\""),
        ("'v12'[1, 2]", "\"12\""),
        ("'v12'[-1]", "\"2\""),
        ("['/a', '/b'].map { |p| p.start_with?('/b', /x/) }", "[false, true]"),
        ("'/admin'.start_with?(/\\/ad/)", "true"),
    ] {
        shows(source, expected);
    }
}

#[test]
fn pattern_without_linear_time_search_raises() {
    for (pattern, why) in [
        ("(?=a)", "look"),
        ("(a)\\1", "backreferences"),
        ("(", "unclosed"),
        ("(a{1000}){1000}", "size limit"),
        (&"a".repeat(5000), "longer"),
    ] {
        let (set, mut engine) = TestRules::of(&format!("x = 1\n/{pattern}/ =~ 'a'")).engine();
        evaluate(&mut engine).1.unwrap();
        let fault = set.status()[0].last_fault.clone().unwrap_or_else(|| panic!("{pattern}"));
        assert!(fault.message.contains(why), "{fault}");
        assert_eq!(fault.line, Some(2));
    }
    // What takes other engines exponential time.
    shows("/(a+)+$/ =~ 'a' * 50_000 + 'b'", "nil");
}

#[test]
fn a_text_that_is_searched_has_a_longest_length() {
    let search = |len: usize| {
        let (set, mut engine) = TestRules::of(&format!("/b/ =~ 'a' * {len}")).engine();
        evaluate(&mut engine).1.unwrap();
        set.status()[0].last_fault.as_ref().map(|fault| fault.message.clone())
    };
    assert_eq!(search(super::TEXT_LEN_MAX), None);
    let fault = search(super::TEXT_LEN_MAX + 1).expect("it is too long");
    assert!(fault.contains("65537 bytes") && fault.contains("65536"), "{fault}");
}

/// Each match looks at all of the rest of the text, to see that there is no `z`.
#[test]
fn many_searches_of_one_call_have_a_longest_time() {
    for call in ["text.scan(/a.*z|a/)", "text.gsub(/a.*z|a/, 'b')", "text.split(/a.*z|a/)"] {
        let (set, mut engine) = TestRules::of(&format!("text = 'a' * 65_000\n{call}")).engine();
        evaluate(&mut engine).1.unwrap();
        let fault = set.status()[0].last_fault.clone().unwrap_or_else(|| panic!("{call}"));
        // Of the two bounds, the one of the whole evaluation may be reached first where programs are not optimised.
        let bounds = ["more than 100 ms of processor time", "more processor time than one evaluation may"];
        assert!(bounds.iter().any(|bound| fault.message.contains(bound)), "{call}: {fault}");
        assert_eq!(fault.line, Some(2));
    }
}

#[test]
fn patterns_made_from_requests_are_bounded() {
    let source = "200.times { |n| /host#{n}/ =~ 'host1' }\nApache.rputs Regexp::KEPT[nil].size.to_s";
    let kept: usize = written(source).parse().unwrap();
    assert!(kept <= super::COMPILED_MAX, "{kept}");
    super::COMPILED.with_borrow(|compiled| assert!(compiled.len() <= super::COMPILED_MAX));
}
