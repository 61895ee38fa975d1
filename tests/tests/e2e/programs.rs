//! Programs of tenants that several topics use.
//!
//! Not here: those that one test alone is about; they stand beside it.

/// An application in a few lines of Perl: listens where it is told, answers one request of each connection, and ends
/// or crashes when it is asked for that.
pub const ONE_ANSWER_PER_CONNECTION: &str = r#"#!/usr/bin/perl
use strict;
use warnings;
use Socket;
use IO::Socket::UNIX;
use IO::Socket::INET;
$SIG{PIPE} = 'IGNORE';
my $server = $ENV{NAGAYA_SOCKET}
    ? IO::Socket::UNIX->new(Type => SOCK_STREAM, Local => $ENV{NAGAYA_SOCKET}, Listen => 64)
    : IO::Socket::INET->new(LocalAddr => '127.0.0.1', LocalPort => $ENV{PORT}, Listen => 64);
die "listen: $!" unless $server;
print STDERR "the application listens\n";
while (my $client = $server->accept) {
    # The keeper looks whether somebody listens, and says nothing.
    my $line = <$client> or next;
    while (my $field = <$client>) { last if $field eq "\r\n"; }
    exit 3 if $line =~ m{ /exit };
    kill 'KILL', $$ if $line =~ m{ /crash };
    my $body = "pid $$ uid $<";
    print $client "HTTP/1.1 200 OK\r\nContent-Length: " . length($body) . "\r\nConnection: close\r\n\r\n$body";
    close $client;
}
"#;

/// An application in Python that keeps its connections, remembers which run of it this is, and does what a test asks of
/// it. It listens in whichever way it is told.
pub const INSTANCE: &str = r#"#!/usr/bin/python3
import http.server, os, secrets, socket, socketserver, sys, threading, time

name, run, lock = os.environ["NAME"], secrets.token_hex(8), threading.Lock()
state = {"count": 0, "early": False, "unready": int(os.environ.get("WARM_UP", "0"))}
with open(name + ".starts", "a") as starts:
    starts.write(run + "\n")

def listener():
    if "LISTEN_FDS" in os.environ:
        return "fd", socket.socket(fileno=3)
    if "NAGAYA_SOCKET" in os.environ:
        how, where = "socket", socket.socket(socket.AF_UNIX)
        where.bind(os.environ["NAGAYA_SOCKET"])
    else:
        how, where = "port", socket.socket()
        where.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        where.bind(("127.0.0.1", int(os.environ["PORT"])))
    where.listen(128)
    return how, where

database = []

def query():
    packet = lambda number, body: len(body).to_bytes(3, "little") + bytes([number]) + body
    if not database:
        if os.environ["DB"].startswith("/"):
            database.append(socket.socket(socket.AF_UNIX))
            database[0].connect(os.environ["DB"])
        else:
            host, port = os.environ["DB"].rsplit(":", 1)
            database.append(socket.create_connection((host, int(port))))
        database[0].recv(4096)
        database[0].sendall(packet(1, bytes(36)))
        database[0].recv(4096)
    with open(name + ".queries", "a") as queries:
        queries.write("asked\n")
    database[0].sendall(packet(0, b"\x03SELECT 1"))
    return database[0].recv(4096)[4:].decode()

class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *words):
        pass

    def say(self, text, status=200):
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def do_GET(self):
        path = self.path.split("?")[0]
        with lock:
            if path == "/ready":
                state["unready"] -= 1
                return self.say("", 503 if state["unready"] > 0 else 200)
            state["early"] |= state["unready"] > 0
            if path == "/count":
                state["count"] += 1
                return self.say(str(state["count"]))
        if path == "/exit":
            os._exit(3)
        if path == "/slow":
            return self.slow()
        if path == "/echo":
            return self.echo()
        if path == "/long":
            return self.long()
        if path == "/query":
            return self.say(" ".join(query() for _ in range(int(self.path.split("?")[1]))))
        answers = {
            "/run": run, "/who": "uid %d" % os.getuid(), "/listens": how, "/password": os.environ.get("PASSWORD"),
            "/asked-before-ready": "yes" if state["early"] else "no",
        }
        self.say(answers.get(path, "?"))

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        with open(name + ".notes", "a") as notes:
            notes.write("noted\n")
        os._exit(4)

    def slow(self):
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for _ in range(20):
            self.wfile.write(b"4\r\nrow\n\r\n")
            time.sleep(0.1)
        self.wfile.write(b"0\r\n\r\n")

    def long(self):
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.wfile.write(b"30000\r\n" + bytes(0x30000) + b"\r\n")
        while not os.path.exists(name + ".told"):
            time.sleep(0.05)
        self.wfile.write(b"3\r\nend\r\n0\r\n\r\n")

    def echo(self):
        self.send_response(101)
        self.send_header("Connection", "upgrade")
        self.send_header("Upgrade", "echo")
        self.end_headers()
        while data := self.connection.recv(4096):
            self.connection.sendall(data)
        self.close_connection = True

class Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
    daemon_threads = True

server = Server(("", 0), Handler, bind_and_activate=False)
server.socket.close()
how, server.socket = listener()
print("the application", name, "listens", file=sys.stderr, flush=True)
server.serve_forever(poll_interval=3600)
"#;
