//! Applications on an image of an OCI layout: a real program, from nothing but its layers.
//!
//! Not here: unpacking by itself (unit tests of `bases`), other bases (`sandbox`).

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use nagaya_keeper_api::protocol::FailureKind;
use nagaya_records::instance::{InstanceCommand, Tier};
use serde_json::{Value, json};

use crate::FoundFact;
use crate::layers::{Layer, Writer, architecture};
use crate::rest::{NEVER, until_idle};
use crate::world::{World, read_socket, refusal, set_mode, site_name};

pub const ROOT: &[FoundFact] = &[
    ("an application runs on an image of a layout, and two sites share it", runs_on_an_image),
    ("a tenant that has no more of an image than its manifest does not get it", manifest_alone),
    ("a layout that its tenant may not read, or that was altered, is no base", refused_layouts),
];

pub const PERL: &str = "/usr/bin/perl";

/// Answers with what it sees of its base.
pub const SERVER: &str = r#"
use Socket;
socket(S, PF_UNIX, SOCK_STREAM, 0) or die;
bind(S, sockaddr_un($ENV{NAGAYA_SOCKET})) or die "bind: $!";
listen(S, 64) or die;
$SIG{PIPE} = 'IGNORE';
sub text { open(my $f, '<', $_[0]) or return 'none'; my $line = <$f>; chomp $line; $line }
sub tells {
    my $top = join(' ', sort map { s{^/}{}r } glob('/*'));
    my $writes = open(my $f, '>', '/etc/mine') ? 'writes' : 'reads';
    return join('|', text('/etc/greeting'), text('/etc/gone'), $writes, $top, text('/home/node/file'), $<);
}
while (accept(C, S)) { syswrite(C, tells()); close C; }
"#;

/// Perl, with the libraries it is linked with and the modules it needs, and nothing else. The error: there is none here.
fn perl() -> Result<Layer, String> {
    let said = |command: &mut Command| -> Result<String, String> {
        let output = command.output().map_err(|error| format!("{command:?}: {error}"))?;
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    };
    let inc = said(Command::new(PERL).args(["-e", "print join qq(\\n), @INC"]))?;
    let modules = inc.lines().find(|dir| dir.ends_with("/perl-base")).ok_or("needs Debian's perl-base")?;
    let extension = format!("{modules}/auto/Socket/Socket.so");
    let mut files = vec![PERL.to_owned(), extension.clone()];
    for program in [PERL, &extension] {
        let libraries = said(Command::new("ldd").arg(program))?;
        files.extend(libraries.split_whitespace().filter(|word| word.starts_with('/')).map(str::to_owned));
    }
    for module in [
        "Socket.pm",
        "Exporter.pm",
        "XSLoader.pm",
        "strict.pm",
        "warnings.pm",
        "warnings/register.pm",
        "Carp.pm",
        "File/Glob.pm",
    ] {
        files.push(format!("{modules}/{module}"));
    }
    files.push(format!("{modules}/auto/File/Glob/Glob.so"));
    files.sort();
    files.dedup();
    let add = |layer: Layer, path: &String| match fs::read(path) {
        Ok(bytes) if fs::metadata(path).unwrap().permissions().mode() & 0o111 != 0 => {
            layer.program(path, bytes)
        }
        Ok(bytes) => layer.file(path, bytes),
        Err(_) => layer,
    };
    Ok(files.iter().fold(Layer::new(), add))
}

/// Perl below, its own files above.
pub fn layout(dir: &Path, greeting: &str) -> Result<(Writer, Vec<Value>), String> {
    let mut writer = Writer::new(dir);
    let own = Layer::new()
        .file("etc/greeting", greeting)
        .file("etc/.wh.gone", "")
        .file("home/node/file", "of the image\n")
        .dir("srv/")
        .link("usr/share/doc", "/home/node")
        .hard("etc/also", "etc/greeting")
        .device("dev/sda")
        .long(&format!("usr/share/{}", "long-name/".repeat(15).trim_end_matches('/')), b"");
    let layers = vec![
        writer.zstd(perl()?.file("etc/greeting", "below\n").file("etc/gone", "still here\n")),
        writer.plain(own),
    ];
    writer.image("v1", architecture(), &layers);
    Ok((writer, layers))
}

pub fn app(base: &Path) -> Value {
    json!({"kind": "app", "command": [PERL, "server.pl"], "directory": "www", "start_seconds": 300, "idle": NEVER(),
        "base": format!("oci:{}:v1", base.display())})
}

fn runs_on_an_image() -> Result<(), String> {
    let mut world = World::new();
    let base = world.dir.path().join("layout");
    let (mut writer, layers) = layout(&base, "hello\n")?;
    for (site, tenant) in [("one", "alice"), ("two", "bob")] {
        world.script_of(tenant, "server.pl", SERVER);
        world.site(site, tenant, app(&base));
    }
    let world = world.start();
    let bases = world.dir.path().join("state/bases");
    let unpacked = || fs::read_dir(&bases).unwrap().count();
    world.run(async |keeper| {
        let tells = async |site: &str| {
            let used = keeper.use_instance(&site_name(site), None).await.unwrap();
            read_socket(used.socket).await
        };
        let (one, two) = (tells("one").await, tells("two").await);
        let parts: Vec<&str> = one.split('|').collect();
        assert_eq!(parts[..3], ["hello", "none", "reads"], "{one}");
        assert_eq!(parts[4], "of the image", "{one}");
        assert!(
            !parts[3].split(' ').any(|name| ["var", "opt", "root", "bin"].contains(&name)),
            "of the node: {one}"
        );
        assert_eq!(one.rsplit_once('|').unwrap().0, two.rsplit_once('|').unwrap().0);
        assert_ne!(one, two, "each under its own uid");
        assert_eq!(unpacked(), 1, "once for both");
        assert_eq!(fs::metadata(&bases).unwrap().permissions().mode() & 0o777, 0o700);
        // A new image under the same name is what the next start runs on.
        let above = writer.gzip(Layer::new().file("etc/greeting", "changed\n"));
        fs::remove_file(base.join("index.json")).unwrap();
        writer = Writer::new(&base);
        writer.image("v1", architecture(), &[layers[0].clone(), layers[1].clone(), above]);
        until_idle(&world, "one").await;
        assert!(tells("one").await.starts_with("hello|"), "what runs goes on as it is");
        until_idle(&world, "one").await;
        world.act("one", InstanceCommand::Rest { to: Some(Tier::Cold) });
        assert!(tells("one").await.starts_with("changed|"));
        assert_eq!(unpacked(), 2);
    });
    Ok(())
}

fn manifest_alone() -> Result<(), String> {
    let mut world = World::new();
    let (alices, bobs) = (world.dir.path().join("layout"), world.home("bob").join("www/layout"));
    let (writer, layers) = layout(&alices, "private\n")?;
    let copy = |descriptors: &[&Value]| {
        for descriptor in descriptors {
            let from = writer.blob_path(descriptor);
            fs::copy(&from, bobs.join(from.strip_prefix(&alices).unwrap())).unwrap();
        }
    };
    fs::create_dir_all(bobs.join("blobs/sha256")).unwrap();
    for name in ["oci-layout", "index.json"] {
        fs::copy(alices.join(name), bobs.join(name)).unwrap();
    }
    let index: Value = serde_json::from_slice(&fs::read(alices.join("index.json")).unwrap()).unwrap();
    let manifest = &index["manifests"][0];
    let inner: Value = serde_json::from_slice(&fs::read(writer.blob_path(manifest)).unwrap()).unwrap();
    copy(&[manifest, &inner["config"]]);
    for (tenant, site, base) in [("alice", "alices", &alices), ("bob", "bobs", &bobs)] {
        world.script_of(tenant, "server.pl", SERVER);
        world.site(site, tenant, app(base));
    }
    let world = world.start();
    let bobs_site = |name: &str| crate::world::site_change(name, "bob", app(&bobs), json!({}));
    world.apply(vec![bobs_site("forged"), bobs_site("whole")]);
    world.run(async |keeper| {
        let tells = async |site: &str| {
            let used = keeper.use_instance(&site_name(site), None).await;
            Ok(read_socket(used?.socket).await)
        };
        assert!(tells("alices").await.unwrap().starts_with("private|"));
        assert_eq!(refusal(tells("bobs").await), (FailureKind::Broken, 326));
        // Files of the right names and lengths are no layers.
        for layer in &layers {
            let path = bobs.join(writer.blob_path(layer).strip_prefix(&alices).unwrap());
            fs::File::create(path).unwrap().set_len(layer["size"].as_u64().unwrap()).unwrap();
        }
        assert_eq!(refusal(tells("forged").await), (FailureKind::Broken, 326));
        copy(&layers.iter().collect::<Vec<_>>());
        assert!(tells("whole").await.unwrap().starts_with("private|"));
    });
    let log = world.log();
    assert!(log.contains("is missing in the layout") && log.contains("was altered"), "{log}");
    assert_eq!(fs::read_dir(world.dir.path().join("state/bases")).unwrap().count(), 1, "once for both");
    Ok(())
}

fn refused_layouts() -> Result<(), String> {
    let mut world = World::new();
    world.script("server.pl", SERVER);
    let (closed, altered) = (world.dir.path().join("closed"), world.dir.path().join("altered"));
    layout(&closed, "hello\n")?;
    set_mode(&closed, 0o700);
    let (writer, layers) = layout(&altered, "hello\n")?;
    let path = writer.blob_path(&layers[1]);
    let mut bytes = fs::read(&path).unwrap();
    bytes[600] ^= 1;
    fs::write(&path, bytes).unwrap();
    world.site("closed", "alice", app(&closed));
    world.site("altered", "alice", app(&altered));
    let world = world.start();
    world.run(async |keeper| {
        for site in ["closed", "altered"] {
            let asked = keeper.use_instance(&site_name(site), None).await;
            assert_eq!(refusal(asked), (FailureKind::Broken, 326), "{site}");
        }
    });
    assert!(
        world.log().contains("was altered") && world.log().contains("that its tenant can read"),
        "{}",
        world.log()
    );
    let left = fs::read_dir(world.dir.path().join("state/bases")).unwrap().count();
    assert_eq!(left, 0);
    Ok(())
}
