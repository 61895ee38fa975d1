<?php
// Settings of the demo's WordPress. The database's account is in a file that only the site's owner reads.
require __DIR__ . '/../database.php';

define('DB_CHARSET', 'utf8mb4');
define('DB_COLLATE', '');
$table_prefix = 'wp_';

// It is reached at whatever address the visitor used: nagaya passes on only requests for its own hosts.
if (isset($_SERVER['HTTP_HOST'])) {
    define('WP_HOME', 'http://' . $_SERVER['HTTP_HOST']);
    define('WP_SITEURL', WP_HOME);
}

// It has no network: nothing is asked of the world, and it does not ask itself to do its chores.
define('WP_HTTP_BLOCK_EXTERNAL', true);
define('DISABLE_WP_CRON', true);
define('AUTOMATIC_UPDATER_DISABLED', true);

if (!defined('ABSPATH')) {
    define('ABSPATH', __DIR__ . '/');
}
require_once ABSPATH . 'wp-settings.php';
