//! Fuzz target for texts of rule files: mruby's parser and code generator are C.
//!
//! Not here: running the compiled code. The fuzzer sees no branches of C, so inputs are only
//! mutated, not guided.

use nagaya_base::fuzz::{FuzzTarget, copy_seeds};

use crate::regexp;

/// All fuzz targets.
pub const TARGETS: &[FuzzTarget] = &[
    FuzzTarget { name: "rule_text", run: read_rule, seeds: rules },
    FuzzTarget { name: "rule_pattern", run: read_pattern, seeds: patterns },
];

fn rules() -> Vec<Vec<u8>> {
    copy_seeds(&[
        b"Server = get_server_class\nr = Server::Request.new\nif r.uri =~ /^\\/a(b|c)*/\n  Server.return 403\nend\n",
        b"def f(a, *b, c: 1, **d, &e)\n  yield a rescue nil\nensure\n  p \"#{b}\"\nend\n",
        b"x = <<~EOS\n  a#{1 + 2}\nEOS\n%w[a b].each { |y| case y when 'a' then next else break end }\n",
        b"class A < B\n  attr_accessor :c\n  def <=>(o) = @a <=> o.a\nend\nmodule M; end\n-> (x) { x ** 2 }.(3)\n",
        b"begin; raise 'x'; rescue => e; retry if false; end while (a &&= b) || [*1..3, {a: 1}]\n",
    ])
}

/// Checks that compiling ends, and that an error says what is wrong.
fn read_rule(bytes: &[u8]) {
    if let Err(fault) = crate::check(bytes, "rule.rb") {
        assert!(!fault.message.is_empty());
    }
}

fn patterns() -> Vec<Vec<u8>> {
    copy_seeds(&[
        b"\0^/a(b|c)*\\z",
        b"\0(?<name>\\h+)\\k",
        b"\0[[:alpha:]&&[^x]]\\p{L}",
        b"\0(?imx-x: a # b\n)",
        b"\0\\A\\Z(?=a)",
        b"\0(((a{9}){9}){9}){9}",
    ])
}

/// Checks a pattern. The first byte has the options. Translated to the syntax of `regex`, it
/// compiles within the limits or is refused.
fn read_pattern(bytes: &[u8]) {
    let Some((options, source)) = bytes.split_first() else { return };
    let Ok(source) = std::str::from_utf8(source) else { return };
    regexp::is_pattern(source, options & 7);
}
