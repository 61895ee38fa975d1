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
