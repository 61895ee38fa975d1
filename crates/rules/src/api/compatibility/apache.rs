//! The table for `Apache` of mod_mruby.

use crate::api::compatibility::class::MethodRow;
use crate::api::compatibility::class::MethodSupport::{Differs, Missing, Same};
use crate::api::compatibility::class::UpstreamClass;

const NO_REWRITE: &str = "it would make the request another one for what answers than for the log; set \
    `uri`, `args` or a header field";
const USER: &str =
    "as the client names itself in `Authorization: Basic`; nobody has checked the password when rules run";
const BACKEND: &str = "what answers is set in the site's record";
const NO_BODY: &str = "rules read the head of a request; its body is passed on as it comes";
const NOT_OPENED: &str = "the file is opened by the keeper under the tenant's rights, after the rules";
const CONFIGURATION: &str = "a setting of the node; see `nagaya config dump`";
const NO_WORKERS: &str = "there is no table of workers; `nagaya status` and the metrics show what runs";
const SITE_FREE: &str = "how many more requests of the site may run at once; `site` has more (docs/rules.md)";
const BODIES: &str = "rules do not change bodies";
const PASSWORDS: &str = "rules do not check passwords; the site's application does";
const TEXT: &str = "adds to the text of the answer; without `Apache.return` it is answered with 200";

pub const CLASSES: &[UpstreamClass] = &[
    UpstreamClass {
        name: "Apache",
        rows: &[
            MethodRow(".rputs .echo", Differs(TEXT)),
            MethodRow(
                ".return",
                Differs(
                    "sets the answer and goes on, like upstream; numbers that are no HTTP status are an \
                        `ArgumentError`",
                ),
            ),
            MethodRow(
                ".sleep",
                Missing("it would hold up all requests of the thread; use `limit` or `lane`"),
            ),
            MethodRow(".errlogger .log", Same),
            MethodRow(".syslogger .syslog", Differs("to the node's own log")),
            MethodRow(".module_name", Differs("`nagaya`")),
            MethodRow(".module_version", Differs("nagaya's")),
            MethodRow(".server_version", Differs("`nagaya/` and its version")),
            MethodRow(".server_build", Missing("see `nagaya --version`")),
            MethodRow(".remove_global_variable", Missing("assign nil instead")),
            MethodRow(".count_arena", Missing("a number of mruby's own that means nothing here")),
            MethodRow(".get_tid", Differs("0, which `attach` takes as this request")),
        ],
    },
    UpstreamClass {
        name: "Kernel",
        rows: &[
            MethodRow("server_name", Differs("`Apache`, also in files that use `Nginx`: both are there")),
            MethodRow("get_server_class", Differs("`Apache`, likewise")),
            MethodRow(
                "run",
                Missing("rules do not make responses from Rack applications; run the application as a site"),
            ),
        ],
    },
    UpstreamClass {
        name: "Apache::Request",
        rows: &[
            MethodRow(".new", Same),
            MethodRow("the_request protocol unparsed_uri uri args hostname method scheme", Same),
            MethodRow("user", Differs(USER)),
            MethodRow("ap_auth_type", Differs("`Basic` where there is a `user`")),
            MethodRow("filename canonical_filename", Differs("nil for sites without files")),
            MethodRow("path_info document_root", Differs("nil for sites without files")),
            MethodRow("range", Same),
            MethodRow(
                "status content_length status_line",
                Differs("of the response, in the last phase; before: 200, 0 and nil, like upstream"),
            ),
            MethodRow(
                "content_type content_encoding",
                Differs("of the response, in the last phase; before: what rules have set"),
            ),
            MethodRow("vlist_validator handler", Differs("nil")),
            MethodRow(
                "uri= args= user= document_root= filename=",
                Differs("as the request goes on from there; nil takes it back"),
            ),
            MethodRow(
                "content_type= content_encoding= status=",
                Differs("of the response that the site gives"),
            ),
            MethodRow(
                "the_request= protocol= vlist_validator= ap_auth_type= unparsed_uri= canonical_filename= \
                    path_info= hostname= status_line= method= range= content_length=",
                Missing(NO_REWRITE),
            ),
            MethodRow("handler= proxyreq= reverse_proxy", Missing(BACKEND)),
            MethodRow("proxyreq", Differs("`Apache::PROXYREQ_NONE`")),
            MethodRow("assbackwards header_only proto_num method_number", Same),
            MethodRow(
                "chunked read_body read_chunked used_path_info eos_sent no_cache no_local_copy",
                Differs("as upstream says before the response: 0"),
            ),
            MethodRow("response_time", Same),
            MethodRow(
                "main? sub_request? prev? internal_redirect? next? external_redirect?",
                Differs("false: nagaya makes no requests of its own"),
            ),
            MethodRow("run_handler", Missing(BACKEND)),
            MethodRow("body", Missing(NO_BODY)),
            MethodRow("error_log_into", Missing("`file` in `[log]` says where the log is")),
            MethodRow("error_log log", Same),
            MethodRow("notes headers_in headers_out", Same),
            MethodRow("finfo", Missing(NOT_OPENED)),
        ],
    },
    UpstreamClass { name: "Apache::Notes", rows: &[MethodRow("[] []=", Same)] },
    UpstreamClass {
        name: "Apache::Headers_in",
        rows: &[
            MethodRow("[]", Differs("of fields that came several times, the first")),
            MethodRow("[]=", Differs("seen by later rules and by what answers; nil removes the field")),
            MethodRow("all user_agent referer", Same),
        ],
    },
    UpstreamClass {
        name: "Apache::Headers_out",
        rows: &[
            MethodRow(
                "[]",
                Differs("what rules have set, and in the last phase the response's; nil if absent"),
            ),
            MethodRow(
                "[]=",
                Differs("`Set-Cookie` is added, others are replaced, like upstream; nil removes the field"),
            ),
            MethodRow("all", Same),
        ],
    },
    UpstreamClass {
        name: "Apache::Finfo",
        rows: &[MethodRow(
            "permission mode filetype group user device inode nlink size csize atime ctime mtime",
            Missing(NOT_OPENED),
        )],
    },
    UpstreamClass {
        name: "Apache::Connection",
        rows: &[
            MethodRow(".new", Same),
            MethodRow(
                "remote_ip remote_port local_ip local_port",
                Differs("behind a trusted proxy the client's address and port as the proxy gives them"),
            ),
            MethodRow(
                "remote_host remote_logname local_host",
                Differs("nil: nagaya does not ask DNS or identd for each request"),
            ),
            MethodRow("keepalives", Same),
            MethodRow("data_in_input_filters", Differs("0")),
        ],
    },
    UpstreamClass {
        name: "Apache::Server",
        rows: &[
            MethodRow(".new", Same),
            MethodRow("hostname", Differs("the host the request asks for")),
            MethodRow("document_root", Differs("of the site")),
            MethodRow("is_virtual", Differs("1")),
            MethodRow(
                "error_fname error_fname= loglevel loglevel= path admin redirect_server_scheme defn_name \
                    keep_alive_max keep_alive pathlen limit_req_line limit_req_fieldsize \
                    limit_req_fields timeout timeout= keep_alive_timeout redirect_server_port \
                    defn_line_number",
                Missing(CONFIGURATION),
            ),
        ],
    },
    UpstreamClass {
        name: "Apache::Env",
        rows: &[
            MethodRow(".new", Same),
            MethodRow(
                "[] all",
                Differs("what rules have set; the rest of a program's environment is made after the rules"),
            ),
            MethodRow(
                "[]=",
                Differs(
                    "passed to CGI and PHP programs and to scripts of applications, but for names that are the server's or decide \
                     what is loaded (NGY0429)",
                ),
            ),
        ],
    },
    UpstreamClass {
        name: "Apache::Scoreboard",
        rows: &[
            MethodRow(".new", Same),
            MethodRow("loadavg", Same),
            MethodRow("busy_worker", Differs("requests that run on this node")),
            MethodRow("idle_worker", Differs(SITE_FREE)),
            MethodRow(
                "status counter pid cpu_load server_limit thread_limit access_counter total_kbyte \
                    total_access uptime restart_time",
                Missing(NO_WORKERS),
            ),
        ],
    },
    UpstreamClass {
        name: "Apache::AuthnProvider",
        rows: &[MethodRow("user password realm rethash rethash=", Missing(PASSWORDS))],
    },
    UpstreamClass {
        name: "Apache::Filter",
        rows: &[MethodRow(
            "puts insert_tail insert_head insert_eos destroy cleanup flatten length empty? first_bucket \
                uid gid error_create body body=",
            Missing(BODIES),
        )],
    },
];
