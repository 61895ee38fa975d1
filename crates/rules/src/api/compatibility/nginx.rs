//! The table for `Nginx` of ngx_mruby.

use super::Class;
use super::Row;
use super::Support::{Differs, Missing, Same};

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

pub const CLASSES: &[Class] = &[
    Class {
        name: "Nginx",
        rows: &[
            Row(".rputs .echo", Differs(TEXT)),
            Row(
                ".return .send_header .status_code=",
                Differs(
                    "sets the answer and goes on; codes up to 0 (`OK`, `DECLINED`, ...) mean to go on. \
                        200 without a text is an empty page, not 500",
                ),
            ),
            Row(".log .errlogger", Same),
            Row(".module_name", Differs("`nagaya`")),
            Row(".module_version", Differs("nagaya's")),
            Row(".nginx_version .server_version", Differs("`nagaya/` and its version")),
            Row(".configure", Missing("see `nagaya --version`")),
            Row(
                ".redirect",
                Differs(
                    "to `http://` and `https://` only; other sites and paths are not served in a site's name",
                ),
            ),
            Row(".remove_global_variable", Missing("assign nil instead")),
            Row(".var", Same),
        ],
    },
    Class {
        name: "Nginx::Request",
        rows: &[
            Row(".new", Same),
            Row(
                "request_line uri unparsed_uri method protocol args scheme hostname authority uri_args",
                Same,
            ),
            Row(
                "user",
                Differs(
                    "the name in `Authorization: Basic`, as the client gives it; nobody has checked the \
                        password",
                ),
            ),
            Row("filename document_root", Differs("nil for sites without files")),
            Row("content_type", Differs("of the response, in the last phase; before: what rules have set")),
            Row("content_type=", Differs("sets the field of the response")),
            Row("request_line= uri= unparsed_uri= method= protocol= args= uri_args=", Missing(NO_REWRITE)),
            Row("sub_request?", Differs("false: nagaya makes no requests of its own")),
            Row("var headers_in headers_out", Same),
            Row("body get_body post_args", Missing(NO_BODY)),
            Row("read_body", Differs("does nothing, like upstream")),
        ],
    },
    Class {
        name: "Nginx::Headers_in",
        rows: &[
            Row("[]", Differs("of fields that came several times, the first, and not an Array")),
            Row("[]= delete", Differs("seen by later rules and by what answers")),
            Row("all user_agent", Same),
        ],
    },
    Class {
        name: "Nginx::Headers_out",
        rows: &[
            Row("[]", Differs("what rules have set, and in the last phase the response's; nil if absent")),
            Row("[]= delete all", Same),
        ],
    },
    Class {
        name: "Nginx::Connection",
        rows: &[
            Row(".new", Same),
            Row(
                "remote_ip remote_port local_ip local_port",
                Differs("behind a trusted proxy the client's address and port as the proxy gives them"),
            ),
        ],
    },
    Class {
        name: "Nginx::Server",
        rows: &[
            Row(".new", Same),
            Row("document_root path realpath_root", Differs("of the site; nil for sites without files")),
            Row("add_listener", Missing("addresses are set by `[[listen]]`")),
        ],
    },
    Class {
        name: "Nginx::Var",
        rows: &[
            Row(".new", Same),
            Row("method_missing", Differs(VARIABLES)),
            Row("exist?", Same),
            Row("set", Missing("keep it in `Nginx::Headers_in` or a global of the rule")),
        ],
    },
    Class { name: "Nginx::Filter", rows: &[Row("body body= output", Missing(BODIES))] },
    Class {
        name: "Nginx::Upstream",
        rows: &[Row("server server= keepalive_cache keepalive_cache=", Missing(BACKEND))],
    },
    Class {
        name: "Nginx::SSL",
        rows: &[Row(
            "servername local_port tls_version certificate= certificate_key= certificate_data= \
                certificate_key_data= .errlogger .log",
            Missing(CERTIFICATES),
        )],
    },
    Class { name: "Nginx::Async", rows: &[Row(".sleep", Missing(NO_WAITING))] },
    Class { name: "Nginx::Async::HTTP", rows: &[Row(".sub_request .last_response", Missing(NO_WAITING))] },
    Class {
        name: "Nginx::Utils",
        rows: &[Row(".encode_parameters .escape", Missing("made for sub-requests, which there are none of"))],
    },
    Class {
        name: "Nginx::Stream",
        rows: &[Row(".errlogger .log .module_name .add_listener", Missing(STREAMS))],
    },
    Class {
        name: "Nginx::Stream::Connection",
        rows: &[Row(
            "upstream_server upstream_server= stream_status stream_status= remote_ip remote_addr \
                remote_port local_ip local_addr local_port local_ip_port proxy_protocol_ip \
                proxy_protocol_addr",
            Missing(STREAMS),
        )],
    },
    Class { name: "Nginx::Stream::Async", rows: &[Row(".sleep", Missing(NO_WAITING))] },
];
