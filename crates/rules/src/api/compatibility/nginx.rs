//! The table for `Nginx` of ngx_mruby.

use crate::api::compatibility::class::MethodRow;
use crate::api::compatibility::class::MethodSupport::{Differs, Missing, Same};
use crate::api::compatibility::class::UpstreamClass;

const NO_REWRITE: &str = "it would make the request another one for what answers than for the log; \
    `Apache::Request` has `uri=` and `args=`";
const NO_BODY: &str = "rules read the head of a request; its body is passed on as it comes";
const BACKEND: &str = "what answers is set in the site's record";
const BODIES: &str = "rules do not change bodies";
const CERTIFICATES: &str = "certificates are set in the site's record";
const NO_WAITING: &str = "a rule does not wait; use `limit` or `lane`";
const VARIABLES: &str = "the variables of the request: `host`, `http_NAME`, `sent_http_NAME`, \
    `arg_NAME`, `request_uri`, `uri`, `args`, `request_method`, `scheme`, `https`, `remote_addr`, \
    `remote_port`, `remote_user`, `server_addr`, `server_port`, `server_protocol`, `document_root`, \
    `request_filename`, `request_id`, `content_length`, `body_bytes_sent`, `status`; others are nil";
const STREAMS: &str = "nagaya serves HTTP only";
const TEXT: &str = "adds to the text of the answer; without `Nginx.return` it is answered with 200";

pub const CLASSES: &[UpstreamClass] = &[
    UpstreamClass {
        name: "Nginx",
        rows: &[
            MethodRow(".rputs .echo", Differs(TEXT)),
            MethodRow(
                ".return .send_header .status_code=",
                Differs(
                    "sets the answer and goes on; codes up to 0 (`OK`, `DECLINED`, ...) mean to go on. \
                        200 without a text is an empty page, not 500",
                ),
            ),
            MethodRow(".log .errlogger", Same),
            MethodRow(".module_name", Differs("`nagaya`")),
            MethodRow(".module_version", Differs("nagaya's")),
            MethodRow(".nginx_version .server_version", Differs("`nagaya/` and its version")),
            MethodRow(".configure", Missing("see `nagaya --version`")),
            MethodRow(
                ".redirect",
                Differs(
                    "to `http://` and `https://` only; other sites and paths are not served in a site's name",
                ),
            ),
            MethodRow(".remove_global_variable", Missing("assign nil instead")),
            MethodRow(".var", Same),
        ],
    },
    UpstreamClass {
        name: "Nginx::Request",
        rows: &[
            MethodRow(".new", Same),
            MethodRow(
                "request_line uri unparsed_uri method protocol args scheme hostname authority uri_args",
                Same,
            ),
            MethodRow(
                "user",
                Differs(
                    "the name in `Authorization: Basic`, as the client gives it; nobody has checked the \
                        password",
                ),
            ),
            MethodRow("filename document_root", Differs("nil for sites without files")),
            MethodRow(
                "content_type",
                Differs("of the response, in the last phase; before: what rules have set"),
            ),
            MethodRow("content_type=", Differs("sets the field of the response")),
            MethodRow(
                "request_line= uri= unparsed_uri= method= protocol= args= uri_args=",
                Missing(NO_REWRITE),
            ),
            MethodRow("sub_request?", Differs("false: nagaya makes no requests of its own")),
            MethodRow("var headers_in headers_out", Same),
            MethodRow("body get_body post_args", Missing(NO_BODY)),
            MethodRow("read_body", Differs("does nothing, like upstream")),
        ],
    },
    UpstreamClass {
        name: "Nginx::Headers_in",
        rows: &[
            MethodRow("[]", Differs("of fields that came several times, the first, and not an Array")),
            MethodRow("[]= delete", Differs("seen by later rules and by what answers")),
            MethodRow("all user_agent", Same),
        ],
    },
    UpstreamClass {
        name: "Nginx::Headers_out",
        rows: &[
            MethodRow(
                "[]",
                Differs("what rules have set, and in the last phase the response's; nil if absent"),
            ),
            MethodRow("[]= delete all", Same),
        ],
    },
    UpstreamClass {
        name: "Nginx::Connection",
        rows: &[
            MethodRow(".new", Same),
            MethodRow(
                "remote_ip remote_port local_ip local_port",
                Differs("behind a trusted proxy the client's address and port as the proxy gives them"),
            ),
        ],
    },
    UpstreamClass {
        name: "Nginx::Server",
        rows: &[
            MethodRow(".new", Same),
            MethodRow(
                "document_root path realpath_root",
                Differs("of the site; nil for sites without files"),
            ),
            MethodRow("add_listener", Missing("addresses are set by `[[listen]]`")),
        ],
    },
    UpstreamClass {
        name: "Nginx::Var",
        rows: &[
            MethodRow(".new", Same),
            MethodRow("method_missing", Differs(VARIABLES)),
            MethodRow("exist?", Same),
            MethodRow("set", Missing("keep it in `Nginx::Headers_in` or a global of the rule")),
        ],
    },
    UpstreamClass { name: "Nginx::Filter", rows: &[MethodRow("body body= output", Missing(BODIES))] },
    UpstreamClass {
        name: "Nginx::Upstream",
        rows: &[MethodRow("server server= keepalive_cache keepalive_cache=", Missing(BACKEND))],
    },
    UpstreamClass {
        name: "Nginx::SSL",
        rows: &[MethodRow(
            "servername local_port tls_version certificate= certificate_key= certificate_data= \
                certificate_key_data= .errlogger .log",
            Missing(CERTIFICATES),
        )],
    },
    UpstreamClass { name: "Nginx::Async", rows: &[MethodRow(".sleep", Missing(NO_WAITING))] },
    UpstreamClass {
        name: "Nginx::Async::HTTP",
        rows: &[MethodRow(".sub_request .last_response", Missing(NO_WAITING))],
    },
    UpstreamClass {
        name: "Nginx::Utils",
        rows: &[MethodRow(
            ".encode_parameters .escape",
            Missing("made for sub-requests, which there are none of"),
        )],
    },
    UpstreamClass {
        name: "Nginx::Stream",
        rows: &[MethodRow(".errlogger .log .module_name .add_listener", Missing(STREAMS))],
    },
    UpstreamClass {
        name: "Nginx::Stream::Connection",
        rows: &[MethodRow(
            "upstream_server upstream_server= stream_status stream_status= remote_ip remote_addr \
                remote_port local_ip local_addr local_port local_ip_port proxy_protocol_ip \
                proxy_protocol_addr",
            Missing(STREAMS),
        )],
    },
    UpstreamClass { name: "Nginx::Stream::Async", rows: &[MethodRow(".sleep", Missing(NO_WAITING))] },
];
