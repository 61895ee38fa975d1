//! Apache 2.4: static sites under prefork and under event, with a virtual host each or with mass
//! virtual hosting.
//!
//! Not here: the other servers.

use std::path::Path;

use anyhow::Result;

use super::{StartProbe, TestServer, make_dir, words, write};
use crate::content::population::SitePopulation;
use crate::http::free_address;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ApacheMpm {
    Prefork,
    Event,
}

/// Form of the sites in Apache's configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ApacheForm {
    /// One `<VirtualHost>` for each site: each may have its own settings.
    VirtualHosts,
    /// `mod_vhost_alias`: the root is computed from the name; all sites share one set of settings.
    Alias,
}

/// Where Debian keeps the modules.
const MODULES: &str = "/usr/lib/apache2/modules";

/// Enough processes (prefork) or threads (event) for every connection of the load, all started in
/// advance. A keep-alive connection holds a prefork process.
const SERVERS: u32 = 128;

pub fn sites(
    dir: &Path,
    population: &SitePopulation,
    mpm: ApacheMpm,
    form: ApacheForm,
) -> Result<TestServer> {
    let name = match (mpm, form) {
        (ApacheMpm::Prefork, ApacheForm::VirtualHosts) => "apache-prefork",
        (ApacheMpm::Event, ApacheForm::VirtualHosts) => "apache-event",
        (ApacheMpm::Prefork, ApacheForm::Alias) => "apache-prefork-alias",
        (ApacheMpm::Event, ApacheForm::Alias) => "apache-event-alias",
    };
    let dir = make_dir(dir, name)?;
    let address = free_address()?;
    let mut config = common(&dir, mpm, address, population);
    match form {
        ApacheForm::VirtualHosts => {
            for site in 0..population.count {
                config.push_str(&format!(
                    "<VirtualHost {address}>\nServerName {}\nDocumentRoot {}\n</VirtualHost>\n",
                    population.host(site),
                    population.root(site).display()
                ));
            }
        }
        ApacheForm::Alias => config.push_str(&format!(
            "LoadModule vhost_alias_module {MODULES}/mod_vhost_alias.so\nUseCanonicalName Off\n\
             VirtualDocumentRoot {}\n",
            population.alias_pattern()
        )),
    }
    let file = dir.join("apache2.conf");
    write(&file, &config)?;
    let command = words(&["apache2", "-DFOREGROUND", "-f", &file.to_string_lossy()]);
    let probe = StartProbe { host: population.host(population.count / 2), path: "/hello.txt".into() };
    TestServer::start(name, &command, &dir, address, &probe)
}

fn common(dir: &Path, mpm: ApacheMpm, address: std::net::SocketAddr, population: &SitePopulation) -> String {
    let dir = dir.display();
    let (module, workers) = match mpm {
        ApacheMpm::Prefork => (
            "mpm_prefork",
            format!(
                "StartServers {SERVERS}\nMinSpareServers {SERVERS}\nMaxSpareServers {}\nServerLimit {}\n\
                 MaxRequestWorkers {}\n",
                SERVERS * 2,
                SERVERS * 2,
                SERVERS * 2
            ),
        ),
        // A child whose threads are all busy closes idle keep-alive connections: each child alone
        // has enough.
        ApacheMpm::Event => (
            "mpm_event",
            format!(
                "StartServers 2\nServerLimit 4\nThreadsPerChild {SERVERS}\nThreadLimit {SERVERS}\n\
                 MinSpareThreads {SERVERS}\nMaxSpareThreads {}\nMaxRequestWorkers {}\n",
                SERVERS * 4,
                SERVERS * 4
            ),
        ),
    };
    format!(
        "ServerRoot {dir}\nServerName localhost\nPidFile {dir}/apache2.pid\nDefaultRuntimeDir {dir}\n\
         ErrorLog {dir}/error.log\nLogLevel error\nMutex fcntl:{dir}\nListen {address}\n\
         LoadModule mpm_module_placeholder\n\
         LoadModule authz_core_module {MODULES}/mod_authz_core.so\nLoadModule mime_module {MODULES}/mod_mime.so\n\
         LoadModule dir_module {MODULES}/mod_dir.so\nTypesConfig /etc/mime.types\nUser www-data\nGroup www-data\n\
         {workers}MaxConnectionsPerChild 0\nKeepAlive On\nKeepAliveTimeout 75\nMaxKeepAliveRequests 0\n\
         Timeout 60\nHostnameLookups Off\nEnableSendfile On\nEnableMMAP On\nServerTokens Prod\nFileETag MTime Size\n\
         <Directory />\nOptions FollowSymLinks\nAllowOverride None\nRequire all denied\n</Directory>\n\
         <Directory {}>\nRequire all granted\n</Directory>\n",
        population.documents().display()
    )
    .replace(
        "LoadModule mpm_module_placeholder\n",
        &format!("LoadModule {module}_module {MODULES}/mod_{module}.so\n"),
    )
}
